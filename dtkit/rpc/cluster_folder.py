"""Private folder of a cluster, whose files connect its processes."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from dtkit.health import status
from dtkit.messages import END_EARLY_PREFIX
from dtkit.rpc.script_ranks import FOLDER_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

JOB_FLAG = "job"
"""Name of a file that lengthens the lease: a job is on the engines."""
_SNAPSHOTS_FOLDER = "snapshots"


class ClusterFolder:
    """The flags, process group stores and snapshots in one cluster's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create_store(self, generation: int) -> Path:
        """Create the file at which a generation of the process group meets."""
        store = self.path / f"store-{generation}"
        store.touch(mode=0o600)
        return store

    def remove_store(self, generation: int) -> None:
        """Delete the files of a generation that has ended, or was never formed."""
        (self.path / f"store-{generation}").unlink(missing_ok=True)
        self.remove_store_marks(generation)

    def remove_store_marks(self, generation: int) -> None:
        """Delete the marks that ranks left when they joined. The store stays, because subgroups meet there too."""
        for path in self.path.glob(f"store-{generation}.*"):
            path.unlink(missing_ok=True)

    def set_end_early(self, job: str, *, enabled: bool) -> None:
        """Let the ranks end this job's dispatch where they next decide whether to continue."""
        flag = self.path / f"{END_EARLY_PREFIX}{job}"
        if enabled:
            with contextlib.suppress(OSError):  # a full disk: the dispatch takes all its steps
                flag.touch(mode=0o600)
        elif flag.exists():  # without a flag, the folder may be read-only by now
            flag.unlink(missing_ok=True)

    def set_job_flag(self, *, present: bool) -> None:
        """Set or remove the flag for the reaper that a job is on the engines, which lengthens the lease."""
        flag = self.path / JOB_FLAG
        if present:
            flag.touch(mode=0o600)
        else:
            flag.unlink(missing_ok=True)

    def make_snapshot_folder(self, job: str) -> Path:
        """Return the path of a job's snapshots, and create its parent folder."""
        folder = self.path / _SNAPSHOTS_FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / job

    def clear(self) -> None:
        """Delete this cluster's files, and the folder if it is then empty."""
        with contextlib.suppress(OSError):
            for path in [*self.path.glob("store-*"), *self.path.glob(f"{END_EARLY_PREFIX}*"), self.path / JOB_FLAG]:
                path.unlink(missing_ok=True)
            status.remove_status_files(self.path)
            for folder in [self.path / _SNAPSHOTS_FOLDER, *self.path.glob(f"{FOLDER_PREFIX}*")]:
                shutil.rmtree(folder, ignore_errors=True)
            self.path.rmdir()

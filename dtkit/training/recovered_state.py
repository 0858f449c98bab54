"""The survivors' state while their job is rebuilt, when nothing else holds it.

It is in shared memory, which outlives the notebook but not the cluster. During a recovery, a file in the run's folder
(see :mod:`dtkit.history.run_log`) has its address. If the notebook dies during a recovery, the notebook that takes the
cluster over repeats the recovery with that state.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from dtkit._util import files
from dtkit.history.run_log import RUNS_FOLDER
from dtkit.rpc import pickling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dtkit.rpc.payload import Payload

_FILENAME = "recovered_state.pkl"


@dataclasses.dataclass(frozen=True)
class RecoveredState:
    """A state, and the payloads that hold it."""

    step: int
    payloads: tuple[Payload, ...]
    source: str = ""
    """Source of the state, in words; empty if survivors were at this step."""

    @contextlib.contextmanager
    def keep_during_recovery(self, folder: Path, job: str, *, is_owned: Callable[[], bool]) -> Iterator[None]:
        """Keep the state for a notebook that takes over meanwhile. At the end, free it if the cluster `is_owned`."""
        self._save(folder, job)
        try:
            yield
        finally:
            if is_owned():
                self.discard(folder, job)

    def discard(self, folder: Path, job: str) -> None:
        """Free the shared memory, and delete the file with its address."""
        _get_path(folder, job).unlink(missing_ok=True)
        for payload in self.payloads:
            payload.discard()

    def _save(self, folder: Path, job: str) -> None:
        """Write the address to disk. No-op if the cluster can't be re-attached; a full disk must not prevent the
        recovery.
        """
        path = _get_path(folder, job)
        if not path.parent.is_dir():
            return
        with contextlib.suppress(OSError):
            files.replace_file(path, pickling.dumps(self))


def list_jobs(folder: Path) -> list[str]:
    """Return the jobs that a notebook was recovering when it ended."""
    return sorted(path.parent.name for path in folder.glob(f"{RUNS_FOLDER}/*/{_FILENAME}"))


def load_interrupted(folder: Path, job: str) -> RecoveredState | None:
    """Return the state that a notebook stored before it ended during a recovery."""
    path = _get_path(folder, job)
    # unpickles: written by this user's earlier notebook; only this user can write to its folder
    return pickling.loads(path.read_bytes()) if path.exists() else None


def _get_path(folder: Path, job: str) -> Path:
    return folder / RUNS_FOLDER / job / _FILENAME

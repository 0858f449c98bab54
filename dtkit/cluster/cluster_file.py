"""What a cluster says of itself in its folder, so that another kernel finds it and can take it over.

``cluster.json`` is written when a cluster has started, and again whenever it has other engines or another owner. It
holds no secret: the keys are in ipyparallel's connection files beside it, in a folder that only the user can enter.

Every version of dtkit writes ``version``, ``begun``, and who ``notebook`` and ``warden`` are; the rest may change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dtkit import __version__
from dtkit._util import files, formatting
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

CLUSTER_FILE = "cluster.json"


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """How a cluster was started, and how it stands."""

    folder: Path
    owner: int
    """The notebook that has it: later ones have larger numbers."""
    notebook: tuple[int, float]
    """That notebook's process: pid and start time."""
    warden: tuple[int, float]
    engine_ids: tuple[int, ...]
    """Ipyparallel's id of each rank."""
    spare_ids: tuple[int, ...]
    begun: float
    """When it was started: seconds since the epoch."""
    launch_config: dict[str, Any]
    """As in :class:`dtkit.cluster.transport.LaunchConfig`."""
    step_timeout: float | None = None
    interface: str | None = None
    version: str = __version__

    @property
    def name(self) -> str:
        """What to call it by."""
        return self.folder.name

    @property
    def is_alive(self) -> bool:
        """Whether the process that watches over it runs: it ends last."""
        return is_process_alive(*self.warden)

    @property
    def is_owned(self) -> bool:
        """Whether the notebook that has it still runs."""
        return is_process_alive(*self.notebook)

    def describe(self) -> str:
        """One line."""
        age = formatting.format_duration(max(0.0, time.time() - self.begun))
        notebook = "its notebook still runs" if self.is_owned else "its notebook has ended"
        what = (
            f"of dtkit {self.version}"
            if self.is_other_version
            else formatting.format_count(len(self.engine_ids), "engine")
        )
        return f"{self.name}: {what}, started {age} ago, {notebook}"

    @property
    def is_other_version(self) -> bool:
        """Whether another version of dtkit has it: then only those fields hold that every version writes."""
        return self.version != __version__

    def write(self) -> None:
        """Put them into the folder, all at once."""
        said = {name: value for name, value in dataclasses.asdict(self).items() if name != "folder"}
        files.replace_file(self.folder / CLUSTER_FILE, json.dumps(said))


_FILE_KEYS = {field.name for field in dataclasses.fields(ClusterInfo)} - {"folder"}


def read_cluster_file(folder: Path) -> ClusterInfo:
    """Of one folder. FileNotFoundError, or ValueError, TypeError or KeyError where they are none."""
    said = json.loads((folder / CLUSTER_FILE).read_text(encoding="utf-8"))
    if said["version"] != __version__ or said.keys() != _FILE_KEYS:
        return _read_other_version(folder, said)
    lists = {name: tuple(said[name]) for name in ("notebook", "warden", "engine_ids", "spare_ids")}
    return ClusterInfo(folder=folder, **{**said, **lists})


def _read_other_version(folder: Path, fields: dict[str, Any]) -> ClusterInfo:
    """Another version's, which may say more, or less: no more of them than what is needed to refuse it by name."""
    notebook, warden = ((int(pid), float(created)) for pid, created in (fields["notebook"], fields["warden"]))
    begun, version = float(fields["begun"]), str(fields["version"])
    version += " (another build)" if version == __version__ else ""
    return ClusterInfo(
        folder, 0, notebook, warden, engine_ids=(), spare_ids=(), begun=begun, launch_config={}, version=version
    )


def find_running(runtime_folder: Path) -> list[ClusterInfo]:
    """The clusters of this user that run on this machine, oldest first."""
    found = []
    for folder in runtime_folder.glob("dtkit-*"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if _is_private(folder) and (papers := read_cluster_file(folder)).is_alive:
                found.append(papers)
    return sorted(found, key=lambda papers: papers.begun)


def _is_private(folder: Path) -> bool:
    """Whether only this user can have written it: what lies there is believed, and unpickled."""
    status = folder.lstat()
    private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and private


def choose_cluster(clusters: Sequence[ClusterInfo], name: str | None) -> ClusterInfo:
    """The one that is meant; ClusterError with the list where that can't be told."""
    listed = "\n".join(f"  {papers.describe()}" for papers in clusters)
    if not clusters:
        raise ClusterError("no cluster of yours is running on this machine; start one with dtkit.Cluster()")
    if name is None:
        free = [papers for papers in clusters if not papers.is_owned]
        candidates = free or list(clusters)
        if len(candidates) == 1:
            return candidates[0]
        raise ClusterError(
            f"{len(clusters)} clusters are running; name one, as in attach({clusters[-1].name!r}):\n{listed}"
        )
    for papers in clusters:
        if papers.name == Path(name).name:
            return papers
    raise ClusterError(f"no cluster {name!r} is running; there are:\n{listed}")


def is_process_alive(pid: int, start_time: float) -> bool:
    """Whether that very process still runs."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return bool(process.create_time() == start_time and process.status() != psutil.STATUS_ZOMBIE)
    return False


def get_process_identity(pid: int) -> tuple[int, float]:
    """Pid and start time, by which `is_process_alive` knows a process again."""
    return pid, psutil.Process(pid).create_time()

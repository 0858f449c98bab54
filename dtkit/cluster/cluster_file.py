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
from dtkit._util import formatting
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

FILE = "cluster.json"


@dataclasses.dataclass(frozen=True)
class Papers:
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
    start: dict[str, Any]
    """As in :class:`dtkit.cluster.transport.Start`."""
    step_timeout: float | None = None
    interface: str | None = None
    version: str = __version__

    @property
    def name(self) -> str:
        """What to call it by."""
        return self.folder.name

    @property
    def alive(self) -> bool:
        """Whether the process that watches over it runs: it ends last."""
        return lives(*self.warden)

    @property
    def owned(self) -> bool:
        """Whether the notebook that has it still runs."""
        return lives(*self.notebook)

    def text(self) -> str:
        """One line."""
        age = formatting.duration(max(0.0, time.time() - self.begun))
        notebook = "its notebook still runs" if self.owned else "its notebook has ended"
        what = f"of dtkit {self.version}" if self.foreign else formatting.plural(len(self.engine_ids), "engine")
        return f"{self.name}: {what}, started {age} ago, {notebook}"

    @property
    def foreign(self) -> bool:
        """Whether another version of dtkit has it: then only those fields hold that every version writes."""
        return self.version != __version__

    def write(self) -> None:
        """Put them into the folder, all at once."""
        said = {name: value for name, value in dataclasses.asdict(self).items() if name != "folder"}
        temporary = self.folder / (FILE + ".new")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(said), encoding="utf-8")
        temporary.replace(self.folder / FILE)


_FIELDS = {field.name for field in dataclasses.fields(Papers)} - {"folder"}


def read(folder: Path) -> Papers:
    """Of one folder. FileNotFoundError, or ValueError, TypeError or KeyError where they are none."""
    said = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if said["version"] != __version__ or said.keys() != _FIELDS:
        return _foreign(folder, said)
    lists = {name: tuple(said[name]) for name in ("notebook", "warden", "engine_ids", "spare_ids")}
    return Papers(folder=folder, **{**said, **lists})


def _foreign(folder: Path, said: dict[str, Any]) -> Papers:
    """Another version's, which may say more, or less: no more of them than what is needed to refuse it by name."""
    notebook, warden = ((int(pid), float(created)) for pid, created in (said["notebook"], said["warden"]))
    begun, version = float(said["begun"]), str(said["version"])
    version += " (another build)" if version == __version__ else ""
    return Papers(folder, 0, notebook, warden, engine_ids=(), spare_ids=(), begun=begun, start={}, version=version)


def running(where: Path) -> list[Papers]:
    """The clusters of this user that run on this machine, oldest first."""
    found = []
    for folder in where.glob("dtkit-*"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if _is_ours(folder) and (papers := read(folder)).alive:
                found.append(papers)
    return sorted(found, key=lambda papers: papers.begun)


def _is_ours(folder: Path) -> bool:
    """Whether only this user can have written it: what lies there is believed, and unpickled."""
    status = folder.lstat()
    private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and private


def choose(found: Sequence[Papers], name: str | None) -> Papers:
    """The one that is meant; ClusterError with the list where that can't be told."""
    listed = "\n".join(f"  {papers.text()}" for papers in found)
    if not found:
        raise ClusterError("no cluster of yours is running on this machine; start one with dtkit.Cluster()")
    if name is None:
        free = [papers for papers in found if not papers.owned]
        candidates = free or list(found)
        if len(candidates) == 1:
            return candidates[0]
        raise ClusterError(f"{len(found)} clusters are running; name one, as in attach({found[-1].name!r}):\n{listed}")
    for papers in found:
        if papers.name == Path(name).name:
            return papers
    raise ClusterError(f"no cluster {name!r} is running; there are:\n{listed}")


def lives(pid: int, created: float) -> bool:
    """Whether that very process still runs."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return bool(process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE)
    return False


def identity(pid: int) -> tuple[int, float]:
    """Pid and start time, by which `lives` knows a process again."""
    return pid, psutil.Process(pid).create_time()

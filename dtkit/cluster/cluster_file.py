"""The cluster file, by which another notebook finds a cluster and takes it over.

``cluster.json`` is in the cluster's folder. It is written when the cluster has started, and when its engines or its
owner change. It holds no secret: the keys are in ipyparallel's connection files.

Every version of dtkit writes ``version``, ``started_at``, ``notebook`` and ``reaper``; the rest may change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import files, formatting
from dtkit._util.installation import PACKAGE_FOLDER, VERSION
from dtkit._util.process import ProcessId
from dtkit._util.stacklevel import find_caller_stacklevel
from dtkit.cluster.reaper import read_lease_s
from dtkit.errors import ClusterError, ClusterWarning
from dtkit.history import run_log

if TYPE_CHECKING:
    from collections.abc import Sequence

CLUSTER_FILE = "cluster.json"


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """How a cluster was started, and which engines it has."""

    folder: Path
    owner: int
    """Number of the notebook that owns it; later ones have larger numbers."""
    notebook: ProcessId
    """Process of the notebook that owns it."""
    reaper: ProcessId
    engine_ids: tuple[int, ...]
    """Ipyparallel's id of each rank."""
    spare_ids: tuple[int, ...]
    started_at: float
    """Seconds since the epoch."""
    launch_config: dict[str, Any]
    """Fields of a :class:`dtkit.cluster.config.LaunchConfig`."""
    step_timeout: float | None = None
    interface: str | None = None
    directory: str = dataclasses.field(default_factory=os.getcwd)
    """Working directory of that notebook."""
    environment: str = sys.prefix
    """Folder of the Python environment that it and the engines use."""
    version: str = VERSION
    package_folder: str = str(PACKAGE_FOLDER)
    """Folder of dtkit that the engines loaded."""

    @property
    def name(self) -> str:
        """Name that :func:`dtkit.attach` takes."""
        return self.folder.name

    @property
    def is_alive(self) -> bool:
        """Whether its reaper, which ends last, runs."""
        return self.reaper.is_alive

    @property
    def is_owned(self) -> bool:
        """Whether the notebook that owns it still runs."""
        return self.notebook.is_alive

    def describe(self) -> str:
        """Return a line for a list of clusters."""
        age = formatting.format_duration(max(0.0, time.time() - self.started_at))
        notebook = (
            f"its notebook (process {self.notebook.pid}) still runs" if self.is_owned else "its notebook has ended"
        )
        size = (
            f"of dtkit {self.version}"
            if self.is_other_version
            else formatting.format_count(len(self.engine_ids), "engine")
        )
        place = "" if self.is_other_version else f", in {self.directory}"
        other = f", with the environment {self.environment}" if self.environment != sys.prefix else ""
        runs = [] if self.is_other_version else run_log.read_labels(self.folder)
        run = f", with the run {runs[-1].name} of {formatting.format_count(runs[-1].steps, 'step')}" if runs else ""
        return f"{self.name}: {size}{run}, started {age} ago{place}{other}, {notebook}"

    def describe_lease(self) -> str:
        """Return when its engines end without a notebook; empty if that is never."""
        lease_s = read_lease_s(self.folder)
        return f"{formatting.format_duration(lease_s)} after it" if math.isfinite(lease_s) else ""

    @property
    def is_in_use(self) -> bool:
        """Whether another notebook owns it and still runs."""
        return self.is_owned and self.notebook != ProcessId.from_pid()

    @property
    def is_of_this_folder(self) -> bool:
        """Whether this process owns it, or its notebook's working directory is that of this process."""
        return self.notebook == ProcessId.from_pid() or self.directory == str(Path.cwd())

    @property
    def is_left_here(self) -> bool:
        """Whether a notebook of this folder and environment has left it, such as this one before a restart."""
        here = not self.is_other_version and self.is_of_this_folder and self.environment == sys.prefix
        return here and not self.is_owned

    @property
    def is_other_version(self) -> bool:
        """Whether another version of dtkit owns it: then only the fields that every version writes are set."""
        return self.version != VERSION

    def write(self) -> None:
        """Replace the cluster file."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "folder"}
        files.replace_file(self.folder / CLUSTER_FILE, json.dumps(fields))


_FILE_KEYS = {field.name for field in dataclasses.fields(ClusterInfo)} - {"folder"}


def read_cluster_file(folder: Path) -> ClusterInfo:
    """Read a folder's cluster file. Raise FileNotFoundError, ValueError, TypeError or KeyError if it isn't one."""
    fields = json.loads((folder / CLUSTER_FILE).read_text(encoding="utf-8"))
    if fields["version"] != VERSION or fields.keys() != _FILE_KEYS:
        return _read_other_version(folder, fields)
    ids = {name: tuple(fields[name]) for name in ("engine_ids", "spare_ids")}
    processes = {name: _read_process(fields[name]) for name in ("notebook", "reaper")}
    return ClusterInfo(folder=folder, **{**fields, **ids, **processes})


def _read_other_version(folder: Path, fields: dict[str, Any]) -> ClusterInfo:
    """Return the fields that every version writes, so that an error can name the cluster."""
    version = str(fields["version"])
    version += " (another build)" if version == VERSION else ""
    return ClusterInfo(
        folder,
        owner=0,
        notebook=_read_process(fields["notebook"]),
        reaper=_read_process(fields["reaper"]),
        engine_ids=(),
        spare_ids=(),
        started_at=float(fields["started_at"]),
        launch_config={},
        version=version,
    )


def _read_process(fields: dict[str, Any]) -> ProcessId:
    return ProcessId(int(fields["pid"]), float(fields["start_time"]))


def find_running(runtime_folder: Path) -> list[ClusterInfo]:
    """Return the clusters of this user that run on this machine, oldest first."""
    clusters = []
    for folder in runtime_folder.glob("dtkit-*"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if _is_private(folder) and (info := read_cluster_file(folder)).is_alive:
                clusters.append(info)
    return sorted(clusters, key=lambda info: info.started_at)


def _is_private(folder: Path) -> bool:
    """Return whether only this user can have written it. Its contents are unpickled."""
    status = folder.lstat()
    private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and private


def choose_cluster(clusters: Sequence[ClusterInfo], name: str | None, *, force: bool = False) -> ClusterInfo:
    """Return the cluster with this name, or the only one that is not in use; else raise ClusterError with the list.

    force : whether to allow a cluster that another notebook uses, which must then be named.
    """
    listed = "\n".join(f"  {info.describe()}" for info in clusters)
    if not clusters:
        raise ClusterError("no cluster of yours is running on this machine; start one with dtkit.Cluster()")
    if name is None:
        return _choose_free(clusters, listed)
    for info in clusters:
        if info.name == Path(name).name:
            if info.is_in_use and not force:
                raise ClusterError(
                    f"{info.describe()}. Close the cluster there, or take it from that notebook with "
                    f"attach({info.name!r}, force=True)"
                )
            return info
    raise ClusterError(f"no cluster {name!r} is running; there are:\n{listed}")


def _choose_free(clusters: Sequence[ClusterInfo], listed: str) -> ClusterInfo:
    """Return the only free cluster of this notebook's folder. One of another folder must be named."""
    free = [info for info in clusters if not info.is_owned] or [info for info in clusters if not info.is_in_use]
    ours = [info for info in free if info.is_left_here]
    for candidates in (free, ours):
        if len(candidates) == 1 and candidates[0].is_of_this_folder:
            return candidates[0]
    if not free:
        raise ClusterError(
            f"other notebooks use the clusters that are running; dtkit.Cluster() starts one for this notebook. To take "
            f"one from its notebook, name it, as in attach({clusters[-1].name!r}, force=True):\n{listed}"
        )
    if not any(info.is_of_this_folder for info in free):
        raise ClusterError(
            f"no cluster of a notebook in this folder ({Path.cwd()}) is free. To take one of another folder, name it, "
            f"as in attach({free[-1].name!r}):\n{listed}"
        )
    raise ClusterError(f"{len(clusters)} clusters are running; name one, as in attach({free[-1].name!r}):\n{listed}")


def warn_of_unused(running: Sequence[ClusterInfo]) -> None:
    """Warn of clusters that compete with a new one: of this notebook, and of ended ones in its folder."""
    for info in running:
        engines = formatting.format_count(len(info.engine_ids), "engine")
        if info.notebook == ProcessId.from_pid():
            advice = (
                f"this notebook already has {info.name} with {engines}; close it first with its close(), or, if no "
                f"variable names it any more, with dtkit.attach({info.name!r}).close()"
            )
        elif info.is_left_here:
            age = formatting.format_duration(max(0.0, time.time() - info.started_at))
            lease = info.describe_lease()
            advice = (
                f"{info.name} still has {engines} of a notebook in this folder that has ended. They were started {age} "
                f"ago{f', and end {lease}' if lease else ''}. dtkit.attach({info.name!r}) takes them over"
            )
        else:
            continue
        warnings.warn(advice, ClusterWarning, stacklevel=find_caller_stacklevel())

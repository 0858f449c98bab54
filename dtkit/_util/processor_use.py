"""Which processes of this host use its cores, in words of a reader: "the browser", "this notebook's kernel".

Linux counts the processor time of each process in /proc/PID/stat. Of two counts, the difference is what a process used
in between. A count takes about 30 microseconds for each process. In a container, /proc has the container's processes
alone. On other systems nothing is counted.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit._util.notebook import in_notebook

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_PROC = Path("/proc")
_BROWSERS = ("brave", "chrom", "epiphany", "firefox", "librewolf", "msedge", "opera", "vivaldi", "webkit")
_FIELDS_AFTER_NAME = {"parent": 1, "user": 11, "system": 12}  # places in /proc/PID/stat, behind the name
_KERNEL_THREADS_PARENT = 2
_INTERPRETERS = ("python", "pypy")
_PROGRAM_NAMES = {"dtkit-engine": "another cluster's engines"}
_MODULE_NAMES = {
    "dtkit.cluster.forkserver": "another cluster's engines",
    "ipykernel": "another notebook's kernel",
    "ipykernel_launcher": "another notebook's kernel",
    "ipyparallel.controller": "a cluster's controller",
}


@dataclasses.dataclass(frozen=True)
class _Process:
    name: str
    parent: int
    cpu_s: float


@dataclasses.dataclass(frozen=True)
class ProcessorCount:
    """Processor time of each process so far."""

    at_s: float
    """Time of the count, by the monotonic clock."""
    processes: Mapping[int, _Process]

    @classmethod
    def take(cls, proc: Path = _PROC) -> ProcessorCount:
        """Count the time of all processes that this process may see."""
        return cls(time.monotonic(), dict(_read_processes(proc)))

    def measure_others(self, later: ProcessorCount, own_pids: Collection[int], proc: Path = _PROC) -> dict[str, float]:
        """Return {name: mean number of cores} of the processes that ran until the `later` count, largest first.

        Processes with `own_pids` and those that they started don't count. Processes of one name are added up.
        """
        seconds, cores = later.at_s - self.at_s, dict[str, float]()
        if seconds <= 0:
            return {}
        for pid, process in later.processes.items():
            before = self.processes.get(pid)
            earlier_s = 0.0 if before is None or before.cpu_s > process.cpu_s else before.cpu_s  # a pid is used again
            used_s = process.cpu_s - earlier_s
            if used_s > 0 and not _is_descendant(pid, own_pids, later.processes):
                name = _describe(pid, process, proc)
                cores[name] = cores.get(name, 0.0) + used_s / seconds
        return dict(sorted(cores.items(), key=lambda item: -item[1]))


def name_this_process() -> str:
    """Return what a reader calls this process."""
    return "this notebook's kernel" if in_notebook() else "this Python process"


def _read_processes(proc: Path) -> Iterator[tuple[int, _Process]]:
    ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    for pid in _list_pids(proc):
        try:
            with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - a Path takes twice as long
                head, _, tail = file.read().rpartition(b")")
            fields = tail.split()
            parent, user, system = (int(fields[place]) for place in _FIELDS_AFTER_NAME.values())
        except (OSError, ValueError, IndexError):  # it has ended
            continue
        yield int(pid), _Process(head.partition(b"(")[2].decode(errors="replace"), parent, (user + system) / ticks)


def _list_pids(proc: Path) -> list[str]:
    try:
        return [name for name in os.listdir(proc) if name.isdigit()]  # noqa: PTH208 - as above
    except OSError:  # a system without /proc
        return []


def _is_descendant(pid: int, ancestors: Collection[int], processes: Mapping[int, _Process]) -> bool:
    while pid in processes and pid not in ancestors:
        pid = processes[pid].parent
    return pid in ancestors


def _describe(pid: int, process: _Process, proc: Path) -> str:
    """Return what a reader calls a process."""
    name = process.name
    if process.parent == _KERNEL_THREADS_PARENT:
        return "the operating system"
    if pid == os.getpid():
        return name_this_process()
    if name.lower().startswith(_BROWSERS):
        return "the browser"
    if not name.lower().startswith((*_INTERPRETERS, "jupyter")):
        return _PROGRAM_NAMES.get(name, name)
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return name
    return _describe_python(words, name)


def _describe_python(words: list[str], name: str) -> str:
    """Return the script or module that an interpreter runs, from its command line."""
    arguments = [word for word in words[1:] if word]
    if any("jupyter" in Path(word).name for word in words[:2]):
        return "Jupyter's server"
    if "-m" in arguments[:4] and len(arguments) > (place := arguments.index("-m") + 1):
        return _MODULE_NAMES.get(arguments[place], arguments[place])
    script = next((word for word in arguments if not word.startswith("-")), None)
    if script is None or "-c" in arguments:
        return "another Python program" if name.lower().startswith(_INTERPRETERS) else name
    return _MODULE_NAMES.get(Path(script).stem, Path(script).name)

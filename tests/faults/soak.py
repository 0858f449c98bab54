"""``make soak``: one long training with a random fault every 20 seconds, and a check for leaks.

Early and at the end the run is paused, and the resources of the notebook and its cluster are counted. The final
parameters must equal those of an undisturbed training to 1e-12, and `close` must leave nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import dtkit
from dtkit.history.history import ROW_DTYPE
from dtkit.rpc import shared_memory
from tests.faults import training
from tests.faults.cells import ENGINES, STEP_PLACES
from tests.faults.quiet import quiet
from tests.faults.trap import RepeatedTrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAULTS = ("SIGKILL", "os._exit", "SIGSTOP", "endless loop", "pause", "interrupt")
STEP_S, COLLECTIVE_S, SETTLED_S = 0.05, 6.0, 120.0
WARM = 1 / 6
"""Share of the time after which memory may grow by no more than GROWTH: five minutes of thirty."""
GROWTH, BOUND = 0.05, 1e-12
SLACK = {"child_threads": 4, "child_descriptors": 8}
"""Allowed growth of an engine, which may not have used everything by the first count. A leaked process group would
add three threads per fault."""
_MANY = 1_000_000  # steps: more than a soak takes


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources of the notebook and of all processes that it started."""

    processes: int
    threads: int
    """Threads of the notebook."""
    descriptors: int
    """File descriptors of the notebook, sockets included."""
    child_threads: int
    child_descriptors: int
    """Maximum of the other processes: an engine forms the process group many times."""
    shared_files: int
    memory: dict[tuple[int, str], int]
    """Unshared bytes of each process, by its pid and module."""
    history: int
    """Bytes of the history's rows in the notebook."""

    @classmethod
    def measure(cls, history: int = 0) -> Resources:
        """Return the present resources."""
        gc.collect()  # garbage is no leak
        notebook = psutil.Process()
        processes = [notebook, *notebook.children(recursive=True)]
        alive = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        pids = {str(process.pid) for process in processes}  # a file's name has its owner's pid as third part
        files = [
            path for folder in shared_memory.get_default_directories() for path in Path(folder).glob("dtkit-*-*-*")
        ]
        num_files = sum(path.name.split("-")[2] in pids for path in files)
        memory = {(process.pid, _get_module(process)): process.memory_full_info().uss for process in alive}
        others = [process for process in alive if process != notebook]
        threads = max((process.num_threads() for process in others), default=0)
        descriptors = max((process.num_fds() for process in others), default=0)
        return cls(
            len(alive), notebook.num_threads(), notebook.num_fds(), threads, descriptors, num_files, memory, history
        )

    def __str__(self) -> str:
        return (
            f"{self.processes} processes, {self.threads} threads, {self.descriptors} descriptors (at most "
            f"{self.child_threads} and {self.child_descriptors} in another process), {self.shared_files} shared files, "
            f"{sum(self.memory.values()) / 1e6:.0f} MB"
        )


def _get_module(process: psutil.Process) -> str:
    """Return the module that a process runs."""
    if process.pid == psutil.Process().pid:
        return "notebook"
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words else process.name()


class Soak:
    """One run, with faults injected into it."""

    def __init__(self, cluster: dtkit.Cluster, folder: Path, seed: int) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self._trap = RepeatedTrap(folder / "repeated", STEP_S)
        self.run = _start(cluster, self._trap, _MANY)
        self.faults = 0

    def inject_faults(self, until: float, every_s: float) -> None:
        """Inject a fault every `every_s` seconds until that time; each must be over before the next one."""
        while time.monotonic() < until:
            start, fault, num_events = time.monotonic(), self._random.choice(FAULTS), len(self.run.history.events)
            rank, place = self._random.randrange(ENGINES), self._random.choice(STEP_PLACES)
            self._inject(fault, rank, place)
            self.faults += 1
            entries = [
                event.text[:90] for event in self.run.history.events[num_events:] if event.kind in ("stuck", "repair")
            ]
            row = f"{fault} on rank {rank} in {place}: over after {time.monotonic() - start:.1f} s"
            print("\n    ".join([row, *entries]), flush=True)
            threading.Event().wait(max(0.0, min(start + every_s, until) - time.monotonic()))

    def _inject(self, fault: str, rank: int, place: str) -> None:
        before = self.run.status.step
        if fault == "pause":
            self.run.pause()
            self.run.resume()
        elif fault == "interrupt":
            self.run._driver.submit("interrupt").result(SETTLED_S)
            self.run.resume()
        else:
            self._trap.arm(fault, rank, place)
            _wait_until(lambda: self._trap.has_fired, "the fault has fired")
            before = self.run.status.step
        _wait_until(lambda: self.run.status.step > before + 40 or self._has_left_running(), "steps are taken again")
        if self._has_left_running():
            raise AssertionError(f"the run is {self.run.status.state.value}: {self.run.exception}")

    def _has_left_running(self) -> bool:
        return self.run.status.state is not dtkit.types.State.RUNNING

    def measure_at_rest(self) -> Resources:
        """Pause, wait for the spare engine, measure, and resume."""
        self.run.pause()
        _wait_until(
            lambda: not _is_busy() and len(self._cluster._engine_group.transport.spare_ids) == 1,
            "a spare engine is there",
        )
        resources = Resources.measure(len(self.run.history) * ROW_DTYPE.itemsize)
        self.run.resume()
        return resources


def _is_busy() -> bool:
    """Return whether a short-lived thread of dtkit is active."""
    return any(thread.name in ("dtkit-spares", "dtkit-checkpoint") for thread in threading.enumerate())


def _start(cluster: dtkit.Cluster, trap: Any, steps: int) -> dtkit.Run:
    return training.start(cluster, "DataParallel", trap, steps=steps, lr_scheduler=None)


def _wait_until(condition: Callable[[], bool], description: str) -> None:
    deadline, pause = time.monotonic() + SETTLED_S, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {SETTLED_S:g} s: {description}")
        pause.wait(0.05)


def soak(minutes: float, every_s: float, seed: int) -> list[str]:
    """Run the soak and return the problems."""
    before, problems = Resources.measure(), []
    with tempfile.TemporaryDirectory() as folder, start_quietly() as cluster:
        start = time.monotonic()
        soak_run = Soak(cluster, Path(folder), seed)
        soak_run.run.resume()
        soak_run.inject_faults(start + 60 * minutes * WARM, every_s)
        early = soak_run.measure_at_rest()
        print(f"early: {early}", flush=True)
        soak_run.inject_faults(start + 60 * minutes, every_s)
        late = soak_run.measure_at_rest()
        print(f"late:  {late}", flush=True)
        problems += compare(early, late) + _check_parameters(cluster, soak_run)
    after = Resources.measure()
    print(f"after: {after}", flush=True)
    leaked = [name for name in ("processes", "shared_files") if getattr(after, name) > getattr(before, name)]
    return problems + [f"{name} are left after close" for name in leaked]


def start_quietly() -> dtkit.Cluster:
    """Start a cluster with a spare."""
    with quiet():
        return dtkit.Cluster(ENGINES, threads=1, step_timeout=COLLECTIVE_S, spares=1)


def compare(early: Resources, late: Resources) -> list[str]:
    """Return what grew from `early` to `late`."""
    names = ("processes", "threads", "descriptors", "child_threads", "child_descriptors", "shared_files")
    grown = [f"{n} grew: {getattr(early, n)}, then {getattr(late, n)}" for n in names if _has_grown(early, late, n)]
    both = early.memory.keys() & late.memory.keys()  # replaced engines don't count
    for key in sorted(both, key=lambda key: early.memory[key] - late.memory[key]):
        print(f"  {key[1]}: {early.memory[key] / 1e6:.1f} MB, then {late.memory[key] / 1e6:.1f} MB", flush=True)
    growth = sum(late.memory[key] for key in both) / sum(early.memory[key] for key in both) - 1
    rows = f"{(late.history - early.history) / 1e6:.1f} MB of that in rows of the history"
    print(f"memory of the {len(both)} processes that lived throughout grew by {growth:.1%}; {rows}", flush=True)
    return grown + ([f"memory grew by {growth:.1%}"] if growth > GROWTH else [])


def _has_grown(early: Resources, late: Resources, name: str) -> bool:
    return int(getattr(late, name)) > int(getattr(early, name)) + SLACK.get(name, 0)


def _check_parameters(cluster: dtkit.Cluster, soak_run: Soak) -> list[str]:
    """Compare the parameters with those of an undisturbed training, and return the problems."""
    soak_run.run.stop()
    steps, state = soak_run.run.status.step, soak_run.run.model.state_dict()
    undisturbed = _start(cluster, None, steps)
    undisturbed.resume()
    with quiet():
        undisturbed.wait(600 + steps)
    difference = training.max_difference(state, undisturbed.model.state_dict())
    print(
        f"{steps} steps, {soak_run.faults} faults: parameters differ by {difference:.1e} from an undisturbed run's",
        flush=True,
    )
    return [f"parameters differ by {difference:.1e}"] if difference > BOUND else []


def main(arguments: Sequence[str]) -> int:
    """Run the soak, and return exit status 0 if nothing leaked and the parameters are right."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=20, help="seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    problems = soak(options.minutes, options.every, options.seed)
    print(*(problems or ["nothing leaked, and the parameters are right"]), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

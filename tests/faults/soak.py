"""``make soak``: one long training, a random fault every 20 seconds, and nothing that leaks.

Twice, early and at the end, the run is paused, everything settles, and what the notebook and its cluster hold is
counted. At the end the parameters must be those of a training without any fault, to 1e-12, and after `close` nothing
may be left.
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
from tests.faults.trap import Minefield

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAULTS = ("SIGKILL", "os._exit", "SIGSTOP", "endless loop", "pause", "interrupt")
STEP_S, COLLECTIVE_S, SETTLED_S = 0.05, 6.0, 120.0
WARM = 1 / 6
"""The share of the time after which memory may grow no more than GROWTH: five minutes of thirty."""
GROWTH, BOUND = 0.05, 1e-12
SLACK = {"child_threads": 4, "child_descriptors": 8}
"""What more may be found in an engine: not each of them has done all by the first count. One process group that stays
has three threads, and there is one for each fault."""
_MANY = 1_000_000  # steps: more than a soak takes


@dataclasses.dataclass(frozen=True)
class Held:
    """What the notebook and all that it started hold."""

    processes: int
    threads: int
    """Of the notebook."""
    descriptors: int
    """Of the notebook, sockets among them."""
    child_threads: int
    child_descriptors: int
    """The most that any other process has: an engine's, which forms the process group anew again and again."""
    shared_files: int
    memory: dict[tuple[int, str], int]
    """Bytes that are each process's own, by its pid and what it runs."""
    history: int
    """Bytes of the rows that the notebook keeps of all steps."""

    @classmethod
    def now(cls, history: int = 0) -> Held:
        """As of now."""
        gc.collect()  # Python does so by itself only once there is much more of it: garbage is not held
        own = psutil.Process()
        family = [own, *own.children(recursive=True)]
        alive = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        pids = {str(process.pid) for process in family}  # of the owner, as the third part of a file's name
        files = [
            path for folder in shared_memory.get_default_directories() for path in Path(folder).glob("dtkit-*-*-*")
        ]
        ours = sum(path.name.split("-")[2] in pids for path in files)
        memory = {(process.pid, _runs(process)): process.memory_full_info().uss for process in alive}
        others = [process for process in alive if process != own]
        threads = max((process.num_threads() for process in others), default=0)
        descriptors = max((process.num_fds() for process in others), default=0)
        return cls(len(alive), own.num_threads(), own.num_fds(), threads, descriptors, ours, memory, history)

    def __str__(self) -> str:
        return (
            f"{self.processes} processes, {self.threads} threads, {self.descriptors} descriptors (at most "
            f"{self.child_threads} and {self.child_descriptors} in another process), {self.shared_files} shared files, "
            f"{sum(self.memory.values()) / 1e6:.0f} MB"
        )


def _runs(process: psutil.Process) -> str:
    """The module that a process runs."""
    if process.pid == psutil.Process().pid:
        return "notebook"
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words else process.name()


class Soak:
    """One run, and what is done to it."""

    def __init__(self, cluster: dtkit.Cluster, folder: Path, seed: int) -> None:
        self._cluster, self._dice = cluster, random.Random(seed)
        self._mines = Minefield(folder / "mine", STEP_S)
        self.run = _start(cluster, self._mines, _MANY)
        self.faults = 0

    def go_on(self, until: float, every_s: float) -> None:
        """A fault every so many seconds, until that time; each must be over before the next one."""
        while time.monotonic() < until:
            begun, fault, said = time.monotonic(), self._dice.choice(FAULTS), len(self.run.history.events)
            rank, place = self._dice.randrange(ENGINES), self._dice.choice(STEP_PLACES)
            self._befall(fault, rank, place)
            self.faults += 1
            words = [event.text[:90] for event in self.run.history.events[said:] if event.kind in ("stuck", "repair")]
            row = f"{fault} on rank {rank} in {place}: over after {time.monotonic() - begun:.1f} s"
            print("\n    ".join([row, *words]), flush=True)
            threading.Event().wait(max(0.0, min(begun + every_s, until) - time.monotonic()))

    def _befall(self, fault: str, rank: int, place: str) -> None:
        before = self.run.status.step
        if fault == "pause":
            self.run.pause()
            self.run.resume()
        elif fault == "interrupt":
            self.run._driver.submit("break").result(SETTLED_S)
            self.run.resume()
        else:
            self._mines.lay(fault, rank, place)
            _until(lambda: self._mines.sprung, "the fault has sprung")
            before = self.run.status.step
        _until(lambda: self.run.status.step > before + 40 or self._over(), "steps are taken again")
        if self._over():
            raise AssertionError(f"the run is {self.run.status.state.value}: {self.run.exception}")

    def _over(self) -> bool:
        return self.run.status.state is not dtkit.types.State.RUNNING

    def rest(self) -> Held:
        """Pause, let the spare engine come, count, and go on."""
        self.run.pause()
        _until(lambda: not _busy() and len(self._cluster._transport._spares) == 1, "a spare engine is there")
        found = Held.now(len(self.run.history) * ROW_DTYPE.itemsize)
        self.run.resume()
        return found


def _busy() -> bool:
    """Whether a thread of dtkit's is at work that will end."""
    return any(thread.name in ("dtkit-spares", "dtkit-checkpoint") for thread in threading.enumerate())


def _start(cluster: dtkit.Cluster, trap: Any, steps: int) -> dtkit.Run:
    return training.start(cluster, "DataParallel", trap, steps=steps, lr_scheduler=None)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + SETTLED_S, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {SETTLED_S:g} s: {what}")
        pause.wait(0.05)


def soak(minutes: float, every_s: float, seed: int) -> list[str]:
    """What was wrong."""
    before, problems = Held.now(), []
    with tempfile.TemporaryDirectory() as folder, quiet_start() as cluster:
        begun = time.monotonic()
        one = Soak(cluster, Path(folder), seed)
        one.run.resume()
        one.go_on(begun + 60 * minutes * WARM, every_s)
        early = one.rest()
        print(f"early: {early}", flush=True)
        one.go_on(begun + 60 * minutes, every_s)
        late = one.rest()
        print(f"late:  {late}", flush=True)
        problems += compare(early, late) + _right(cluster, one)
    after = Held.now()
    print(f"after: {after}", flush=True)
    left = [name for name in ("processes", "shared_files") if getattr(after, name) > getattr(before, name)]
    return problems + [f"{name} are left after close" for name in left]


def quiet_start() -> dtkit.Cluster:
    """A cluster with a spare."""
    with quiet():
        return dtkit.Cluster(ENGINES, threads=1, step_timeout=COLLECTIVE_S, spares=1)


def compare(early: Held, late: Held) -> list[str]:
    """What grew."""
    names = ("processes", "threads", "descriptors", "child_threads", "child_descriptors", "shared_files")
    grown = [f"{n} grew: {getattr(early, n)}, then {getattr(late, n)}" for n in names if _more(early, late, n)]
    both = early.memory.keys() & late.memory.keys()  # an engine that took another's place has its own history
    for one in sorted(both, key=lambda one: early.memory[one] - late.memory[one]):
        print(f"  {one[1]}: {early.memory[one] / 1e6:.1f} MB, then {late.memory[one] / 1e6:.1f} MB", flush=True)
    growth = sum(late.memory[one] for one in both) / sum(early.memory[one] for one in both) - 1
    rows = f"{(late.history - early.history) / 1e6:.1f} MB of it are rows of the history"
    print(f"memory of the {len(both)} processes that lived all the while grew by {growth:.1%}; {rows}", flush=True)
    return grown + ([f"memory grew by {growth:.1%}"] if growth > GROWTH else [])


def _more(early: Held, late: Held, name: str) -> bool:
    return int(getattr(late, name)) > int(getattr(early, name)) + SLACK.get(name, 0)


def _right(cluster: dtkit.Cluster, one: Soak) -> list[str]:
    """Whether the parameters are those of a training that nothing happened to."""
    one.run.stop()
    steps, found = one.run.status.step, one.run.model.state_dict()
    plain = _start(cluster, None, steps)
    plain.resume()
    with quiet():
        plain.wait(600 + steps)
    off = training.difference(found, plain.model.state_dict())
    print(f"{steps} steps, {one.faults} faults: parameters differ by {off:.1e} from an undisturbed run's", flush=True)
    return [f"parameters differ by {off:.1e}"] if off > BOUND else []


def main(arguments: Sequence[str]) -> int:
    """Exit status 0 where nothing leaked and the parameters are right."""
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

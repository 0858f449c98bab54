"""A thread on each engine that says where it stands, twice a second, whatever the engine is doing.

It reads what is there anyway: the call being served, the job's step and the last mark of its phases, how many
collectives torch has begun in each process group, and the serving thread's stack. Nothing is added to a step. What it
finds is a :class:`~dtkit.health.status.Standing`, written as a small file into the cluster's folder; the notebook
compares all ranks' (:mod:`dtkit.health.detector`).

The counts tell more than any stack: a rank that waits in a collective has begun one more than the rank that it waits
for, also inside DDP's backward, which is C++ and shows no Python line.

Where C code holds the interpreter this thread can't run, and the file grows old, which is a sign in itself. For that
case SIGUSR1 has faulthandler write all stacks, from C, without the interpreter.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dtkit._util.guard import attempt
from dtkit.engine.observe import stack_sampler
from dtkit.engine.observe.phase_timer import BETWEEN
from dtkit.health.status import IDLE, Standing, dump_file, status_file
from dtkit.history.message_times import MESSAGE_PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dtkit.engine.job import Job
    from dtkit.health.status import Frame
    from dtkit.types import GroupSpec, Request

PERIOD_S = 0.5
_MISSED_S = 2.5 * PERIOD_S  # a look that comes this late: the process was stopped, or its interpreter held
_LOOKS, _FEWEST_LOOKS = 8, 3  # of which the part that was blocked is told
_WAITING = ("sync", *MESSAGE_PHASES)
_SHOWN = {"sync": "collective", "end": "step", BETWEEN: "step"} | {phase: phase.split()[0] for phase in MESSAGE_PHASES}
# how phases are called here, where it isn't as in the marks
_LOOKS_ON = "dtkit's watchdog could not tell where this engine stands, and goes on looking: {error}"


@dataclasses.dataclass(frozen=True)
class _Call:
    """A request that is being served."""

    op: str
    job: str | None
    begun: float
    thread: int
    counts: dict[str, int]
    """Collectives begun before it, by process group: only those of this call can be compared between ranks."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the job stands in its step."""

    phase: str
    step: int | None = None
    marks: int = 0
    waiting: bool = False
    pairwise: bool = False
    median_step_s: float = 0.0
    slowness: float = 1.0


class Watchdog:
    """One engine's. `jobs` are the session's own, read only."""

    def __init__(self, jobs: Mapping[str, Job]) -> None:
        self._jobs = jobs
        self._spec: GroupSpec | None = None
        # locks: while a status file of some kB is written
        self._lock = threading.Lock()  # who holds it may write; after `leave` nobody does
        self._thread: threading.Thread | None = None
        self._never = threading.Event()
        self._call: _Call | None = None
        self._looked = time.time()
        self._moved: tuple[object, float] = (None, time.time())
        self._phase: tuple[object, float] = (None, time.time())
        self._blocked: collections.deque[bool] = collections.deque(maxlen=_LOOKS)
        self._blocked_in: object = None  # the job, or the call, that those looks were at
        self._complaint: str | None = None
        self._complained = False
        self._dump: IO[str] | None = None
        self._main = threading.main_thread().ident or 0

    # -- told by the session ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self, request: Request) -> Iterator[None]:
        """While a request is served."""
        job = request.args.get("job")
        name = job if isinstance(job, str) else None
        self._call = _Call(request.op, name, time.time(), threading.get_ident(), _counts())
        try:
            yield
        finally:
            self._call = None

    def join(self, spec: GroupSpec) -> None:
        """Watch as this rank of this generation, from now on."""
        import psutil

        with self._lock:
            self._created = psutil.Process().create_time()
            self._folder, self._spec = Path(spec.store).parent, spec
            self._register(dump_file(self._folder, spec.rank))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dtkit-watchdog", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """Write nothing more until the next `join`."""
        with self._lock:
            self._spec = None

    def complaint(self) -> str | None:
        """Why a look has failed, if one has: once, for the notebook."""
        said, self._complaint = self._complaint, None
        return said

    def _register(self, path: Path) -> None:
        """Have SIGUSR1 write all stacks. An owner of that signal (a batch system's, a library's) keeps it."""
        if not hasattr(faulthandler, "register") or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
            return
        before, self._dump = self._dump, _private(path)
        faulthandler.register(signal.SIGUSR1, file=self._dump, all_threads=True, chain=False)
        if before is not None:
            before.close()

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._never.wait(PERIOD_S):
            attempt(self._look_and_write, self._complain)

    def _look_and_write(self) -> None:
        with self._lock:
            if self._spec is not None:
                found = self.look(self._spec)
                with contextlib.suppress(OSError):  # a full disk, or the folder is gone: then nobody reads it
                    self._write(found)

    def _complain(self, error: Exception) -> None:
        """A look has failed, and the next one may too: an old file would say that this engine is stuck."""
        with self._lock, contextlib.suppress(OSError):
            if self._spec is not None:
                status_file(self._folder, self._spec.rank).unlink()
        if not self._complained:
            self._complaint, self._complained = _LOOKS_ON.format(error=f"{type(error).__name__}: {error}"), True

    def _write(self, found: Standing) -> None:
        path = status_file(self._folder, found.rank)
        part = path.with_suffix(".json.part")
        with _private(part) as file:
            file.write(found.to_json())
        part.replace(path)

    def look(self, spec: GroupSpec) -> Standing:
        """Where this engine stands now."""
        call, now = self._call, time.time()
        thread = self._main if call is None else call.thread
        rows = stack_sampler.of_thread(thread)
        place = self._place(call, rows)
        counts = {} if call is None else _since(call.counts)
        pairwise = place.pairwise or stack_sampler.in_pairs(rows)
        busy = call is not None or place.phase != IDLE
        blocked = busy and (stack_sampler.in_collective(rows) or (place.waiting and not _in_user_code(rows)))
        waited = self._share(call, blocked=blocked)
        key = (None if call is None else call.begun, place.step, place.phase)
        if now - self._looked > _MISSED_S:  # nobody saw whether it moved, and a process that was stopped could not
            self._moved = (None, now)
        self._looked = now
        self._moved = _since_when(self._moved, (key, place.marks, counts), now)
        self._phase = _since_when(self._phase, key, now)
        return Standing(
            rank=spec.rank,
            world_size=spec.world_size,
            generation=spec.generation,
            host=socket.gethostname(),
            pid=os.getpid(),
            created=self._created,
            time=now,
            op=call.op if call is not None else ("cell" if busy else None),
            phase=place.phase,
            since=self._phase[1],
            still_s=now - self._moved[1],
            blocked=blocked,
            waited=waited,
            job=None if call is None else call.job,
            step=place.step,
            median_step_s=place.median_step_s,
            slowness=place.slowness,
            pairwise=pairwise,
            counts=counts,
            thread=thread,
            dumps=self._dump is not None and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
            stack=rows if busy else (),
            threads=stack_sampler.of_helpers(thread) if busy else {},
        )

    def _share(self, call: _Call | None, *, blocked: bool) -> float | None:
        """Of the last looks at this job, or at this call, the part at which it was blocked."""
        if call is None:
            return None
        what = call.job or call.begun
        if what != self._blocked_in:
            self._blocked.clear()
            self._blocked_in = what
        self._blocked.append(blocked)
        return sum(self._blocked) / len(self._blocked) if len(self._blocked) >= _FEWEST_LOOKS else None

    def _place(self, call: _Call | None, rows: tuple[Frame, ...]) -> _Place:
        if call is None:
            return _Place("cell" if stack_sampler.has_user_code(rows) else IDLE)
        job = None if call.job is None else self._jobs.get(call.job)
        if job is None:
            return _Place(call.op)
        mark, marks = job.setting.phases.seen() if call.op == "advance" else (call.op, 0)
        return _Place(
            _SHOWN.get(mark, mark) or "step",
            job.step,
            marks,
            waiting=mark in _WAITING,
            pairwise=job.setting.mesh.axes.get("pp", 1) > 1,
            median_step_s=job.median_step_s(),
            slowness=job.setting.phases.slowness,
        )


def _in_user_code(rows: tuple[Frame, ...]) -> bool:
    """Whether the innermost line is the user's: then whatever the phase is called, it is not waiting in ours."""
    return bool(rows) and rows[0].kind == "user"


def _since_when(before: tuple[object, float], key: object, now: float) -> tuple[object, float]:
    """What is the case, and since when."""
    return before if before[0] == key else (key, now)


def _counts() -> dict[str, int]:
    """Collectives that this process has begun, by process group: torch's own numbers, which ranks have in common."""
    torch = sys.modules.get("torch.distributed")
    world: Any = getattr(getattr(torch, "distributed_c10d", None), "_world", None)
    found = {}
    for group in list(world.pg_map) if world is not None else ():
        with contextlib.suppress(RuntimeError):  # a backend that does not count, or a group that is being formed
            found[str(world.pg_names.get(group))] = int(group._get_sequence_number_for_group())  # noqa: SLF001 - torch has no public call for it
    return found


def _since(before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in _counts().items()}


def _private(path: Path) -> IO[str]:
    """A file that only this user can read, empty."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")

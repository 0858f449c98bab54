"""A thread on each engine that says where it stands, twice a second, whatever the engine is doing.

It reads what is there anyway: the call being served, the job's step and the last mark of its phases, how many
collectives torch has begun in each process group, and the serving thread's stack. Nothing is added to a step. What it
finds is a :class:`~dtkit.health.status.EngineStatus`, written as a small file into the cluster's folder; the notebook
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

from dtkit._util import files
from dtkit._util.guard import run_guarded
from dtkit.engine.observe import stack_sampler
from dtkit.engine.observe.phase_timer import BETWEEN_PHASES
from dtkit.health.status import IDLE, EngineStatus, get_dump_path, get_status_path
from dtkit.history.comm_time import MESSAGE_PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dtkit.engine.job import Job
    from dtkit.health.status import Frame
    from dtkit.types import GroupSpec, Request

SAMPLE_PERIOD_S = 0.5
_MISSED_SAMPLE_S = (
    2.5 * SAMPLE_PERIOD_S
)  # a look that comes this late: the process was stopped, or its interpreter held
_NUM_SAMPLES, _MIN_SAMPLES = 8, 3  # of which the part that was blocked is told
_WAITING_PHASES = ("sync", *MESSAGE_PHASES)
_PHASE_DISPLAY_NAMES = {"sync": "collective", "end": "step", BETWEEN_PHASES: "step"} | {
    phase: phase.split()[0] for phase in MESSAGE_PHASES
}
# how phases are called here, where it isn't as in the marks
_SAMPLE_FAILED_MESSAGE = "dtkit's watchdog could not tell where this engine stands, and goes on looking: {error}"


@dataclasses.dataclass(frozen=True)
class _ActiveCall:
    """A request that is being served."""

    op: str
    job: str | None
    started_at: float
    thread_id: int
    collective_counts: dict[str, int]
    """Collectives begun before it, by process group: only those of this call can be compared between ranks."""


@dataclasses.dataclass(frozen=True)
class _JobPosition:
    """Where the job stands in its step."""

    phase: str
    step: int | None = None
    num_events: int = 0
    is_waiting: bool = False
    is_p2p: bool = False
    median_step_s: float = 0.0
    delay_factor: float = 1.0


class Watchdog:
    """One engine's. `jobs` are the session's own, read only."""

    def __init__(self, jobs: Mapping[str, Job]) -> None:
        self._jobs = jobs
        self._spec: GroupSpec | None = None
        # locks: while a status file of some kB is written
        self._lock = threading.Lock()  # who holds it may write; after `leave` nobody does
        self._thread: threading.Thread | None = None
        self._stop_event = threading.Event()
        self._active_call: _ActiveCall | None = None
        self._last_sample_at = time.time()
        self._last_progress: tuple[object, float] = (None, time.time())
        self._phase_since: tuple[object, float] = (None, time.time())
        self._blocked_samples: collections.deque[bool] = collections.deque(maxlen=_NUM_SAMPLES)
        self._sampled_work: object = None  # the job, or the call, that those looks were at
        self._warning: str | None = None
        self._warned = False
        self._dump_file: IO[str] | None = None
        self._main_thread_id = threading.main_thread().ident or 0

    # -- told by the session ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def track_request(self, request: Request) -> Iterator[None]:
        """While a request is served."""
        job = request.args.get("job")
        name = job if isinstance(job, str) else None
        self._active_call = _ActiveCall(request.op, name, time.time(), threading.get_ident(), _count_collectives())
        try:
            yield
        finally:
            self._active_call = None

    def start(self, spec: GroupSpec) -> None:
        """Watch as this rank of this generation, from now on."""
        import psutil

        with self._lock:
            self._process_start_time = psutil.Process().create_time()
            self._folder, self._spec = Path(spec.store_path).parent, spec
            self._register_stack_dump(get_dump_path(self._folder, spec.rank))
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample_loop, name="dtkit-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write nothing more until the next `join`."""
        with self._lock:
            self._spec = None

    def take_warning(self) -> str | None:
        """Why a look has failed, if one has: once, for the notebook."""
        said, self._warning = self._warning, None
        return said

    def _register_stack_dump(self, path: Path) -> None:
        """Have SIGUSR1 write all stacks. An owner of that signal (a batch system's, a library's) keeps it."""
        if not hasattr(faulthandler, "register") or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
            return
        before, self._dump_file = self._dump_file, _open_private(path)
        faulthandler.register(signal.SIGUSR1, file=self._dump_file, all_threads=True, chain=False)
        if before is not None:
            before.close()

    # -- the thread -------------------------------------------------------------------------------------------

    def _sample_loop(self) -> None:
        while not self._stop_event.wait(SAMPLE_PERIOD_S):
            run_guarded(self._sample_and_write, self._on_sample_error)

    def _sample_and_write(self) -> None:
        with self._lock:
            if self._spec is not None:
                found = self.sample(self._spec)
                with contextlib.suppress(OSError):  # a full disk, or the folder is gone: then nobody reads it
                    self._write_status(found)

    def _on_sample_error(self, error: Exception) -> None:
        """A look has failed, and the next one may too: an old file would say that this engine is stuck."""
        with self._lock, contextlib.suppress(OSError):
            if self._spec is not None:
                get_status_path(self._folder, self._spec.rank).unlink()
        if not self._warned:
            self._warning, self._warned = _SAMPLE_FAILED_MESSAGE.format(error=f"{type(error).__name__}: {error}"), True

    def _write_status(self, status: EngineStatus) -> None:
        files.replace_file(get_status_path(self._folder, status.rank), status.to_json())

    def sample(self, spec: GroupSpec) -> EngineStatus:
        """Where this engine stands now."""
        call, now = self._active_call, time.time()
        thread = self._main_thread_id if call is None else call.thread_id
        rows = stack_sampler.sample_thread(thread)
        place = self._get_position(call, rows)
        counts = {} if call is None else _count_since(call.collective_counts)
        pairwise = place.is_p2p or stack_sampler.is_in_p2p(rows)
        busy = call is not None or place.phase != IDLE
        blocked = busy and (stack_sampler.is_in_collective(rows) or (place.is_waiting and not _is_in_user_code(rows)))
        waited = self._compute_blocked_fraction(call, blocked=blocked)
        key = (None if call is None else call.started_at, place.step, place.phase)
        if (
            now - self._last_sample_at > _MISSED_SAMPLE_S
        ):  # nobody saw whether it moved, and a process that was stopped could not
            self._last_progress = (None, now)
        self._last_sample_at = now
        self._last_progress = _update_since(self._last_progress, (key, place.num_events, counts), now)
        self._phase_since = _update_since(self._phase_since, key, now)
        return EngineStatus(
            rank=spec.rank,
            world_size=spec.world_size,
            generation=spec.generation,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_start_time=self._process_start_time,
            observed_at=now,
            op=call.op if call is not None else ("cell" if busy else None),
            phase=place.phase,
            phase_since=self._phase_since[1],
            stalled_s=now - self._last_progress[1],
            is_blocked=blocked,
            blocked_fraction=waited,
            job=None if call is None else call.job,
            step=place.step,
            median_step_s=place.median_step_s,
            delay_factor=place.delay_factor,
            is_p2p=pairwise,
            collective_counts=counts,
            thread_id=thread,
            can_dump_stacks=self._dump_file is not None and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
            stack=rows if busy else (),
            threads=stack_sampler.sample_helper_threads(thread) if busy else {},
        )

    def _compute_blocked_fraction(self, call: _ActiveCall | None, *, blocked: bool) -> float | None:
        """Of the last looks at this job, or at this call, the part at which it was blocked."""
        if call is None:
            return None
        what = call.job or call.started_at
        if what != self._sampled_work:
            self._blocked_samples.clear()
            self._sampled_work = what
        self._blocked_samples.append(blocked)
        return (
            sum(self._blocked_samples) / len(self._blocked_samples)
            if len(self._blocked_samples) >= _MIN_SAMPLES
            else None
        )

    def _get_position(self, call: _ActiveCall | None, frames: tuple[Frame, ...]) -> _JobPosition:
        if call is None:
            return _JobPosition("cell" if stack_sampler.has_user_code(frames) else IDLE)
        job = None if call.job is None else self._jobs.get(call.job)
        if job is None:
            return _JobPosition(call.op)
        mark, marks = job.context.phases.get_progress() if call.op == "advance" else (call.op, 0)
        return _JobPosition(
            _PHASE_DISPLAY_NAMES.get(mark, mark) or "step",
            job.step,
            marks,
            is_waiting=mark in _WAITING_PHASES,
            is_p2p=job.context.mesh.axes.get("pp", 1) > 1,
            median_step_s=job.median_step_s(),
            delay_factor=job.context.phases.delay_factor,
        )


def _is_in_user_code(frames: tuple[Frame, ...]) -> bool:
    """Whether the innermost line is the user's: then whatever the phase is called, it is not waiting in ours."""
    return bool(frames) and frames[0].kind == "user"


def _update_since(previous: tuple[object, float], key: object, now: float) -> tuple[object, float]:
    """What is the case, and since when."""
    return previous if previous[0] == key else (key, now)


def _count_collectives() -> dict[str, int]:
    """Collectives that this process has begun, by process group: torch's own numbers, which ranks have in common."""
    torch = sys.modules.get("torch.distributed")
    world: Any = getattr(getattr(torch, "distributed_c10d", None), "_world", None)
    found = {}
    for group in list(world.pg_map) if world is not None else ():
        with contextlib.suppress(RuntimeError):  # a backend that does not count, or a group that is being formed
            found[str(world.pg_names.get(group))] = int(group._get_sequence_number_for_group())  # noqa: SLF001 - torch has no public call for it
    return found


def _count_since(previous_counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count - previous_counts.get(name, 0) for name, count in _count_collectives().items()}


def _open_private(path: Path) -> IO[str]:
    """A file that only this user can read, empty."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")

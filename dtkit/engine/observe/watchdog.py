"""A thread on each engine that writes the engine's status twice a second.

It reads the current call, the job's step and phase, the serving thread's stack, and torch's collective counts by
process group. All of this exists anyway, so a step takes no longer. The result is an
:class:`~dtkit.health.status.EngineStatus` in a small file in the cluster's folder. The notebook compares those of all
ranks (:mod:`dtkit.health.detector`).

The counts show more than stacks do. A rank that waits in a collective has begun one more than the rank that it waits
for. This also holds in DDP's backward, which is C++ without Python frames.

While C code holds the GIL, this thread can't run and the file ages. SIGUSR1 then makes faulthandler write all stacks,
which works without the GIL.
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
from typing import IO, TYPE_CHECKING, Protocol

from dtkit._util import files, timeouts
from dtkit._util.guard import run_guarded
from dtkit.engine.observe import stack_sampler
from dtkit.engine.observe.phase_timer import BETWEEN_PHASES
from dtkit.engine.observe.system_monitor import MONITOR
from dtkit.health.frames import has_user_code
from dtkit.health.status import IDLE, EngineStatus, get_dump_path, get_status_path
from dtkit.history.comm_time import MESSAGE_PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dtkit.engine.observe.phase_timer import PhaseTimer
    from dtkit.health.frames import Frame
    from dtkit.health.link_traffic import LinkTraffic
    from dtkit.mesh import Mesh
    from dtkit.messages import GroupSpec, Request

_NUM_SAMPLES, _MIN_SAMPLES = 8, 3  # for the fraction of blocked samples
_VALIDATION_OPERATION = "evaluate"
_WAITING_PHASES = ("sync", *MESSAGE_PHASES)
_PHASE_DISPLAY_NAMES = {"sync": "collective", "end": "step", BETWEEN_PHASES: "step"} | {
    phase: phase.split()[0] for phase in MESSAGE_PHASES
}
"""Names of phases in the status where they differ from those in events."""
_SAMPLE_FAILED_MESSAGE = "dtkit's watchdog failed to write this engine's status ({error}). It will retry."


class JobContext(Protocol):
    """Part of a job's context that the watchdog reads."""

    @property
    def phases(self) -> PhaseTimer:
        """The recorder of the job's phases."""

    @property
    def mesh(self) -> Mesh:
        """The ranks' mesh."""


class WatchedJob(Protocol):
    """Part of a job that the watchdog reads."""

    @property
    def step(self) -> int:
        """The current step."""

    @property
    def context(self) -> JobContext:
        """The worker's context."""

    def median_step_s(self) -> float:
        """Return the median seconds of the last steps."""


@dataclasses.dataclass(frozen=True)
class _ActiveCall:
    """The request that the engine serves."""

    op: str
    job: str | None
    started_at: float
    thread_id: int
    collective_counts: dict[str, int]
    """Collectives begun before it, by process group; ranks can compare those of the same call only."""
    is_warming_up: bool = False
    """Whether it is the first validation of its job in this process."""


@dataclasses.dataclass(frozen=True)
class _JobPosition:
    """Position of the job within its step."""

    phase: str
    step: int | None = None
    num_events: int = 0
    """Number of phases of this step that have begun."""
    is_waiting: bool = False
    """Whether the phase is one that waits for other ranks."""
    is_p2p: bool = False
    """Whether ranks send messages in pairs, as in a pipeline."""
    median_step_s: float = 0.0
    delay_factor: float = 1.0
    """Factor by which this rank is slowed on purpose."""


@dataclasses.dataclass(frozen=True)
class _Since:
    """A value, and the time of its last change."""

    value: object
    at: float

    def update(self, value: object, now: float) -> _Since:
        """Return this object while the value is unchanged; else the new value, since `now`."""
        return self if self.value == value else _Since(value, now)


class Watchdog:
    """The watchdog of one engine."""

    def __init__(self, jobs: Mapping[str, WatchedJob]) -> None:
        """Watch the session's `jobs`, which may change."""
        self._jobs = jobs
        self._spec: GroupSpec | None = None
        # locks: while a status file of some kB is written
        self._lock = threading.Lock()  # held while writing, so that no status is written after `stop`
        self._thread: threading.Thread | None = None
        self._stop_event = threading.Event()
        self._active_call: _ActiveCall | None = None
        self._validated_jobs: set[str | None] = set()
        self._last_sample_at = time.time()
        self._progress_since = self._phase_since = _Since(None, time.time())
        self._blocked_samples: collections.deque[bool] = collections.deque(maxlen=_NUM_SAMPLES)
        self._sampled_work: object = None  # the job or call of these samples
        self._warning: str | None = None
        self._warned = False
        self._dump_file: IO[str] | None = None
        self._main_thread_id = threading.main_thread().ident or 0
        self._list_links: Callable[[], Sequence[LinkTraffic]] = list

    # -- called by the session --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def track_request(self, request: Request) -> Iterator[None]:
        """Track a request while the context serves it."""
        job = request.args.get("job")
        name = job if isinstance(job, str) else None
        is_validation = request.op == _VALIDATION_OPERATION
        self._active_call = _ActiveCall(
            request.op,
            name,
            time.time(),
            threading.get_ident(),
            _count_collectives(),
            is_warming_up=is_validation and name not in self._validated_jobs,
        )
        try:
            yield
        finally:
            self._active_call = None
            if is_validation:
                self._validated_jobs.add(name)

    def start(self, spec: GroupSpec) -> None:
        """Start sampling with this rank and generation."""
        import psutil

        with self._lock:
            self._process_start_time = psutil.Process().create_time()
            self._folder, self._spec = Path(spec.store_path).parent, spec
            self._register_stack_dump(get_dump_path(self._folder, spec.rank))
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample_loop, name="dtkit-watchdog", daemon=True)
            self._thread.start()

    def watch_links(self, list_links: Callable[[], Sequence[LinkTraffic]]) -> None:
        """Report the traffic with other hosts, too, which a function returns."""
        self._list_links = list_links

    def stop(self) -> None:
        """Stop writing the status until `start` is called again."""
        with self._lock:
            self._spec = None

    def take_warning(self) -> str | None:
        """Return the message of a failed sample for the notebook, once; None without one."""
        warning, self._warning = self._warning, None
        return warning

    def _register_stack_dump(self, path: Path) -> None:
        """Let SIGUSR1 write all stacks, unless a library or a batch system uses this signal."""
        if not hasattr(faulthandler, "register") or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
            return
        before, self._dump_file = self._dump_file, _open_private(path)
        faulthandler.register(signal.SIGUSR1, file=self._dump_file, all_threads=True, chain=False)
        if before is not None:
            before.close()

    # -- the thread -------------------------------------------------------------------------------------------

    def _sample_loop(self) -> None:
        while not self._stop_event.wait(timeouts.WATCHDOG_PERIOD_S):
            run_guarded(self._sample_and_write, self._on_sample_error)

    def _sample_and_write(self) -> None:
        with self._lock:
            if self._spec is not None:
                status = self.sample(self._spec)
                with contextlib.suppress(OSError):  # a full disk, or nobody reads it since the folder is gone
                    self._write_status(status)
                MONITOR.sample_if_due()

    def _on_sample_error(self, error: Exception) -> None:
        """Delete the status after a failed sample, since an old file would make this engine look stuck."""
        with self._lock, contextlib.suppress(OSError):
            if self._spec is not None:
                get_status_path(self._folder, self._spec.rank).unlink()
        if not self._warned:
            self._warning, self._warned = _SAMPLE_FAILED_MESSAGE.format(error=f"{type(error).__name__}: {error}"), True

    def _write_status(self, status: EngineStatus) -> None:
        files.replace_file(get_status_path(self._folder, status.rank), status.to_json())

    def sample(self, spec: GroupSpec) -> EngineStatus:
        """Return this engine's current status."""
        call, now = self._active_call, time.time()
        thread_id = self._main_thread_id if call is None else call.thread_id
        stack = stack_sampler.sample_thread(thread_id)
        position = self._get_position(call, stack)
        counts = {} if call is None else _count_since(call.collective_counts)
        is_busy = call is not None or position.phase != IDLE
        is_waiting = position.is_waiting and not _is_in_user_code(stack)
        is_blocked = is_busy and (is_waiting or stack_sampler.is_in_collective(stack))
        blocked_fraction = self._compute_blocked_fraction(call, blocked=is_blocked)
        self._update_progress(
            (None if call is None else call.started_at, position.step, position.phase),
            (position.num_events, counts),
            now,
        )
        return EngineStatus(
            rank=spec.rank,
            world_size=spec.world_size,
            generation=spec.generation,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_start_time=self._process_start_time,
            observed_at=now,
            op=call.op if call is not None else ("cell" if is_busy else None),
            phase=position.phase,
            phase_since=self._phase_since.at,
            stalled_s=now - self._progress_since.at,
            is_blocked=is_blocked,
            blocked_fraction=blocked_fraction,
            job=None if call is None else call.job,
            is_warming_up=call is not None and call.is_warming_up,
            step=position.step,
            median_step_s=position.median_step_s,
            delay_factor=position.delay_factor,
            is_p2p=position.is_p2p or stack_sampler.is_in_p2p(stack),
            collective_counts=counts,
            thread_id=thread_id,
            can_dump_stacks=self._dump_file is not None and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
            stack=stack if is_busy else (),
            threads=stack_sampler.sample_helper_threads(thread_id) if is_busy else {},
            links=tuple(self._list_links()),
        )

    def _update_progress(self, position: tuple[object, ...], details: tuple[object, ...], now: float) -> None:
        """Update the start of the current phase and the time of the last progress."""
        if now - self._last_sample_at > timeouts.WATCHDOG_MISSED_SAMPLE_S:  # a stopped process can't progress
            self._progress_since = _Since(None, now)
        self._last_sample_at = now
        self._progress_since = self._progress_since.update((position, *details), now)
        self._phase_since = self._phase_since.update(position, now)

    def _compute_blocked_fraction(self, call: _ActiveCall | None, *, blocked: bool) -> float | None:
        """Return the fraction of the last samples of this job, or this call, in which it was blocked."""
        if call is None:
            return None
        work = call.job or call.started_at
        if work != self._sampled_work:
            self._blocked_samples.clear()
            self._sampled_work = work
        self._blocked_samples.append(blocked)
        count = len(self._blocked_samples)
        return sum(self._blocked_samples) / count if count >= _MIN_SAMPLES else None

    def _get_position(self, call: _ActiveCall | None, frames: tuple[Frame, ...]) -> _JobPosition:
        if call is None:
            return _JobPosition("cell" if has_user_code(frames) else IDLE)
        job = None if call.job is None else self._jobs.get(call.job)
        if job is None:
            return _JobPosition(call.op)
        phase, num_events = job.context.phases.get_progress() if call.op == "advance" else (call.op, 0)
        return _JobPosition(
            _PHASE_DISPLAY_NAMES.get(phase, phase) or "step",
            job.step,
            num_events,
            is_waiting=phase in _WAITING_PHASES,
            is_p2p=job.context.mesh.axes.get("pp", 1) > 1,
            median_step_s=job.median_step_s(),
            delay_factor=job.context.phases.delay_factor,
        )


def _is_in_user_code(frames: tuple[Frame, ...]) -> bool:
    """Return whether the innermost frame is the user's. Such a rank counts as working even in a waiting phase."""
    return bool(frames) and frames[0].kind == "user"


def _count_collectives() -> dict[str, int]:
    """Return the number of collectives that this process has begun, by process group: torch's numbers for them."""
    if "torch.distributed" not in sys.modules:  # a late import, since the watchdog doesn't need torch
        return {}
    from dtkit._util.torch_private import count_collectives, world_state

    counts = {}
    for group in list(world_state.pg_map):
        with contextlib.suppress(RuntimeError):  # a backend that doesn't count, or a group that is being formed
            counts[str(world_state.pg_names.get(group))] = int(count_collectives(group))
    return counts


def _count_since(previous_counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count - previous_counts.get(name, 0) for name, count in _count_collectives().items()}


def _open_private(path: Path) -> IO[str]:
    """Open an empty file that only this user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")

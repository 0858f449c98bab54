"""Progress of one run: its plan, state, step and error.

The parts of a run's driver share one :class:`RunProgress`. Only the driver's thread writes to it; other threads read
single attributes.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.formatting import name_nodes
from dtkit.history.undone_steps import UndoneSteps
from dtkit.types import State, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    import numpy as np

    from dtkit.history.history import History
    from dtkit.training.config import RunPlan
    from dtkit.training.recorder import Recorder
    from dtkit.types import EngineLoss, ReplicaCheckResult


_RECENT_STEPS = 50  # whose mean time tells how long the rest takes


class StepTimeEstimate:
    """The time of the next steps: that of the last ones, which vary on a busy host, averaged over some seconds."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._known: tuple[tuple[int, int], float, float | None] = (0, 0), -math.inf, None  # rows, time, seconds

    def estimate(self, now: float, elapsed_s: float) -> float | None:
        """Return seconds; None before the first step. The first steps of a run, which warm up, are soon forgotten.

        Views ask several times between two dispatches.
        """
        history = self._history
        key, (known_key, known_at, known_s) = (history.num_totals, history.num_steps), self._known
        if key != known_key:
            recent = history.totals(history.num_steps - _RECENT_STEPS)["step_s"]
            if not len(recent):
                return None
            recent_s, memory_s = float(recent.mean()), min(timeouts.STEP_TIME_MEMORY_S, elapsed_s / 4)
            weight = math.exp(-(now - known_at) / memory_s) if memory_s > 0 and known_s is not None else 0.0
            known_s = recent_s if known_s is None else recent_s + weight * (known_s - recent_s)
            self._known = key, now, known_s
        return known_s


class RunProgress:
    """State, step and error of one run."""

    def __init__(self, plan: RunPlan, history: History, recorder: Recorder) -> None:
        self.plan = plan
        self.history, self.recorder = history, recorder
        self.state, self.step = State.PENDING, 0
        """Steps that all ranks have taken."""
        self.lr: float | None = None
        self.exception: BaseException | None = None
        """What failed the run, or paused it."""
        self.delay_factors: Mapping[int, float] = {}
        """The ranks that are slowed on purpose, and how many times slower."""
        self.next_step = 0
        """The first step of the next dispatch."""
        self.target_step = 0
        """The step to pause at, or to end at."""
        self.stop_request: str | None = None
        """"pause" or "stop": what to do once nothing is in flight."""
        self.needs_resync = False
        """Whether the engines will refuse what is in flight: nothing is sent until all calls have returned."""
        self.lost_ranks: list[int] = []
        """Ranks whose engines are gone and not yet replaced."""
        self._told_losses: set[int] = set()  # those of them that the log names
        self.release_hint = ""
        """How to continue, once the engines have freed the job."""
        self.retry_count = 0
        """Failed calls since the last step that was taken."""
        # locks: for a few assignments; waits on the Condition are marked
        self.changed = threading.Condition()  # guards `state`, and whether the driver still reads its inbox
        self._accumulated_s = 0.0
        self._running_since: float | None = None
        self._persisted_at = -math.inf
        self._step_time = StepTimeEstimate(history)
        self.describe_last_step: Callable[[], tuple[np.ndarray, ReplicaCheckResult | None]] | None = None
        """Returns the timeline of the last step, and the last comparison of replicas."""
        history.read_position = lambda: (self.step, self.elapsed_s)

    # -- state ------------------------------------------------------------------------------------------------

    def set_state(self, state: State) -> None:
        """Change the state. The caller holds `changed`."""
        now = time.monotonic()
        if self._running_since is not None:
            self._accumulated_s, self._running_since = self._accumulated_s + now - self._running_since, None
        if state is State.RUNNING:
            self._running_since = now
        self.state = state
        self.changed.notify_all()

    def wait_for(self, is_over: Callable[[], bool], timeout: float | None) -> bool:
        """Wait up to `timeout` seconds until `is_over`, which depends on the state. Return whether it is."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        result = False
        with self.changed:
            while not result:
                part = max(0.0, min(timeouts.INTERRUPT_POLL_S, deadline - time.monotonic()))
                result = self.changed.wait_for(is_over, part)
                if time.monotonic() >= deadline:
                    break
        return result

    @property
    def elapsed_s(self) -> float:
        """Seconds spent RUNNING."""
        since = self._running_since
        return self._accumulated_s + (0.0 if since is None else time.monotonic() - since)

    def persist_position(self) -> None:
        """Store the elapsed time and the last step for a notebook that takes over: once a second while RUNNING."""
        now, log = time.monotonic(), self.history.run_log
        is_due = self.state is not State.RUNNING or now >= self._persisted_at + timeouts.ELAPSED_INTERVAL_S
        if log is not None and is_due:
            self._persisted_at = now
            log.write_elapsed(self.history.num_totals, self.elapsed_s)
            if self.describe_last_step is not None:
                log.write_last_step(*self.describe_last_step())

    @property
    def is_pausing(self) -> bool:
        """Whether a requested pause or stop has not taken effect yet."""
        return self.state is State.RUNNING and self.stop_request is not None

    def make_status(self, describe: Callable[[State], str]) -> Status:
        """Return the current state, step, epoch (from 1, as in every view), seconds spent running and seconds left.

        `describe` returns the message for this state, so that both are of one moment.
        """
        step, spec, state = self.step, self.plan.spec, self.state
        return Status(
            state=state,
            step=step,
            steps=spec.steps,
            epoch=max(1, math.ceil(step / spec.steps_per_epoch)),
            elapsed_s=self.elapsed_s,
            remaining_s=self._estimate_remaining_s(step, spec.steps),
            message=describe(state),
            is_stepping=state is State.RUNNING and self.target_step < self.plan.steps,
        )

    def _estimate_remaining_s(self, step: int, steps: int) -> float | None:
        if not step or self.state is not State.RUNNING:
            return None
        step_s = self._step_time.estimate(time.monotonic(), self.elapsed_s)
        return None if step_s is None else (steps - step) * step_s

    # -- what the driver's parts do to it ---------------------------------------------------------------------

    def begin(self) -> None:
        """Become paused at the ranks' step."""
        self.next_step = self.target_step = self.step
        self.stop_request, self.needs_resync, self.retry_count = None, False, 0

    def restore(self, step: int, elapsed_s: float) -> None:
        """Continue from a step of an earlier run."""
        self.step, self._accumulated_s = step, elapsed_s
        self.recorder.boundary_times.begin_anew()
        self.history.add(UndoneSteps(step))

    def rewind(self, step: int, lr: float | None) -> None:
        """All ranks are at `step` again, in jobs that were built again."""
        self.step = self.next_step = step
        self.history.add(UndoneSteps(step))  # also if no step follows
        self.lr, self.lost_ranks, self.retry_count = lr, [], 0
        self.forget_losses()

    def pause_for(self, error: BaseException) -> None:
        """Pause because of an error that the caller must look at."""
        self.stop_request, self.exception = self.stop_request or "pause", error

    def add_event(self, kind: str, text: str, rank: int | None = None, *, notice: str | None = None) -> None:
        """Add an event at the present step."""
        self.recorder.add_event(self.step, kind, text, rank, notice=notice)

    def add_loss(self, rank: int, loss: EngineLoss) -> None:
        """Add an event for a lost engine, once until `forget_losses`."""
        if rank not in self._told_losses:
            self._told_losses.add(rank)
            host = f" on {loss.host}" if loss.host else ""
            self.add_event("lost", f"node {rank}{host} lost at step {self.step:,}: {name_nodes(loss.cause)}", rank)

    def forget_losses(self) -> None:
        """Let the next loss of each rank be a new event."""
        self._told_losses.clear()


def resolve(answer: Future[int], step: int) -> None:
    """Set the step as the answer, unless there is one."""
    if not answer.done():
        answer.set_result(step)

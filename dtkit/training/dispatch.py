"""Dispatches of one run: their numbers of steps, sending, and results.

A *dispatch* is one call that takes several steps. It should last almost a second. This is long enough that the work
between two dispatches costs only about one percent. It is short enough that a new learning rate takes effect soon, and
views are up to date. (A pause does not wait for the end of a dispatch.) The number of steps starts at one, since the
first steps compile and warm up. It grows at most fourfold at a time.

Where short epochs end with an evaluation, a dispatch ends there, too. Then one message to the engines has several
dispatches, and the evaluations between them. So it lasts as long as one dispatch of a long epoch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import timeouts
from dtkit.errors import NonFiniteError
from dtkit.history.between_steps import ALL, VALIDATION
from dtkit.history.divergence import find_large_loss, find_ruined_step
from dtkit.rpc.protocol import JobOperations, make_call
from dtkit.training.learning_rate import LearningRateChange, LearningRateUpdater
from dtkit.training.load_balancing import LoadBalancer
from dtkit.training.nonfinite import build_nonfinite_failures, choose_remedy
from dtkit.training.pending_calls import PendingCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.errors import EngineError
    from dtkit.messages import DispatchResult, OutputItem
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.training.boundary_actions import BoundaryActions, ReplicaCheckAction
    from dtkit.training.pending_calls import PendingCalls
    from dtkit.training.progress import RunProgress
    from dtkit.types import ReplicaCheckResult

    DispatchReply = tuple[DispatchResult, list[OutputItem]]

MAX_GROWTH = 4
MAX_SEND_FRACTION = 0.05  # largest share of a dispatch's time for sending it


class DispatchSizer:
    """The number of steps in the next dispatch, from measured times."""

    def __init__(self) -> None:
        self.next_steps = 1
        """Steps to put into the next dispatch."""
        self.step_s = 0.0
        """Seconds that a step took last; 0 before the first."""
        self._evaluation_s = math.inf  # unknown
        self._mean_send_s = 0.0

    def on_sent(self, seconds: float) -> None:
        """Note the time that the notebook took to send a message."""
        self._mean_send_s = _follow(self._mean_send_s or seconds, seconds)

    def on_result(self, steps: int, step_s: float) -> None:
        """Note that `steps` steps took `step_s` seconds each."""
        if not steps:
            return
        self.step_s = max(step_s, 1e-6)
        wanted = max(timeouts.TARGET_DISPATCH_S, self._mean_send_s / MAX_SEND_FRACTION) / self.step_s
        self.next_steps = 1 if self.step_s >= timeouts.SLOW_STEP_S else max(1, min(round(wanted), MAX_GROWTH * steps))

    def on_evaluation(self, seconds: float) -> None:
        """Note how long an evaluation took, with all else between two dispatches of a message where that is known."""
        self._evaluation_s = seconds if self._evaluation_s == math.inf else _follow(self._evaluation_s, seconds)

    @property
    def steps_per_evaluation(self) -> float:
        """Number of steps that take as long as an evaluation; infinite if either is unknown."""
        return self._evaluation_s / self.step_s if self.step_s > 0 else math.inf

    @property
    def max_in_flight(self) -> int:
        """Messages to keep in flight: two, so that engines don't wait for the notebook; one when steps are slow."""
        return 1 if self.step_s >= timeouts.SLOW_STEP_S else 2


@dataclasses.dataclass
class Message:
    """A message to the engines: dispatches, and evaluations between them."""

    steps_left: float
    """Steps that still fit in; an evaluation counts as the steps that take as long."""
    num_steps: int = 0
    """Steps of its dispatches."""


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """Parameters of one dispatch."""

    steps: int
    lr_change: LearningRateChange | None
    explain: bool
    message: Message
    is_first: bool
    """Whether no other dispatch of its message precedes it."""
    has_replica_check: bool
    """Whether it returns checksums."""


class StepDispatcher:
    """Sends dispatches and records their results."""

    def __init__(
        self,
        engine_group: EngineGroup,
        progress: RunProgress,
        calls: PendingCalls,
        replica_check: ReplicaCheckAction,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.sizer = DispatchSizer()
        self.lr_updater = LearningRateUpdater()
        self.replica_check = replica_check
        self.explain_next_step = False
        self.explain_reports: list[Any] = []
        """What each rank saw in the last step that was explained."""
        self._engine_group, self._progress, self._calls, self._fail = engine_group, progress, calls, fail
        self._load_balancer: LoadBalancer | None = None
        self.reset_balancer()
        progress.describe_last_step = self._describe_last_step

    def reset_balancer(self) -> None:
        """Assume equal speeds for the current number of ranks."""
        sizes = self._progress.plan.options.balanced_shard_sizes
        self._load_balancer = None if sizes is None else LoadBalancer(sizes)

    def rewind(self, step: int) -> None:
        """All ranks are at `step` again, in jobs that were built again."""
        self.lr_updater.reset_to(step)
        self.reset_balancer()

    @property
    def is_full(self) -> bool:
        """Whether enough messages are in flight."""
        return self._calls.num_messages_with_steps >= self.sizer.max_in_flight

    def send_message(self, actions: BoundaryActions) -> None:
        """Send dispatches, and the evaluations between them, in one message. Nothing is due before the first."""
        with self._calls.send_together():
            self._fill(Message(self.sizer.next_steps), actions)
            started_at = time.perf_counter()
        self.sizer.on_sent(time.perf_counter() - started_at)

    def _fill(self, message: Message, actions: BoundaryActions) -> None:
        progress, evaluation_steps = self._progress, self.sizer.steps_per_evaluation
        self._send_up_to(actions.steps_until_due(progress.next_step), message)
        while message.steps_left >= 1 and (step := progress.next_step) < progress.target_step:
            if actions.evaluation.is_due(step) and evaluation_steps <= message.steps_left:
                actions.evaluation.perform(step)
                message.steps_left -= evaluation_steps
            if message.steps_left < 1 or actions.is_any_due(step):
                return
            self._send_up_to(actions.steps_until_due(step), message)

    def _send_up_to(self, max_steps: int, message: Message) -> None:
        """Send the next dispatch: at most `max_steps`, and not beyond its message or the run's target."""
        num_left = self._progress.target_step - self._progress.next_step
        self._send(min(int(message.steps_left), num_left, max_steps), message)

    def flush_lr(self) -> None:
        """Send a requested learning rate ahead of the next steps."""
        if self.lr_updater.has_pending:
            self._send(0, Message(0))

    def check_replicas_before_pause(self) -> bool:
        """Request checksums of the parameters as they are, if known ones are older. Return whether that was done."""
        progress = self._progress
        is_wanted = not progress.lost_ranks and progress.exception is None and self.replica_check.request_at_pause()
        if is_wanted:
            self._send(0, Message(0))
        return is_wanted

    def _send(self, steps: int, message: Message) -> None:
        progress = self._progress
        step = progress.next_step
        is_first, is_explained = not message.num_steps, self.explain_next_step and steps > 0
        has_replica_check = self.replica_check.is_due(step + steps)
        if has_replica_check:
            self.replica_check.perform(step + steps)
        lr_change = self.lr_updater.take_pending()
        dispatch = StepRequest(steps, lr_change, is_explained, message, is_first, has_replica_check)
        message.num_steps += steps
        message.steps_left -= steps
        call = make_call(
            JobOperations.advance,
            job=progress.plan.job,
            step=step,
            steps=steps,
            lr=None if dispatch.lr_change is None else dispatch.lr_change.value,
            shares=None if self._load_balancer is None else self._load_balancer.shares,
            explain=dispatch.explain,
            fingerprint=dispatch.has_replica_check,
            read_until=progress.recorder.get_stored_step(progress.step),
        )
        pending = PendingCall(
            call,
            step,
            on_result=functools.partial(self._on_result, dispatch),
            on_failure=functools.partial(self._on_failure, dispatch, step),
            on_cancel=functools.partial(self._on_cancel, dispatch, step),
        )
        self._calls.send(pending)
        progress.next_step += steps

    # -- results ----------------------------------------------------------------------------------------------

    def _on_result(self, dispatch: StepRequest, step: int, values: Sequence[DispatchReply]) -> None:
        progress = self._progress
        results = [result for result, _ in values]
        progress.recorder.record_steps(values, is_first_of_message=dispatch.is_first)
        first = results[0]
        num_taken, progress.step, progress.lr = first.step - step, first.step, first.lr
        if num_taken:
            self._on_steps_taken(dispatch, num_taken, results)
        if dispatch.has_replica_check:
            self.replica_check.on_result(results)
        progress.persist_position()
        if dispatch.explain:
            self.explain_reports, self.explain_next_step = [result.step_report for result in results], False
        self.lr_updater.on_result(dispatch.lr_change, step)
        if first.end_reason == "nonfinite":
            self._on_nonfinite(results)
        elif first.end_reason == "exhausted":
            self._on_stream_end()
        elif progress.step != step + dispatch.steps:
            progress.needs_resync = True

    def _on_steps_taken(self, dispatch: StepRequest, num_taken: int, results: Sequence[DispatchResult]) -> None:
        self._progress.retry_count = 0
        is_whole = num_taken == dispatch.steps
        self.sizer.on_result(dispatch.message.num_steps if is_whole else num_taken, _get_slowest_step_s(results))
        between = [result.between for result in results if VALIDATION in result.between]
        if between:  # before the first dispatch of a message, an engine may have waited for the notebook
            self.sizer.on_evaluation(max(part[VALIDATION if dispatch.is_first else ALL] for part in between))
        balancer = self._load_balancer
        if balancer is not None and balancer.on_result([np.asarray(result.rows) for result in results]):
            shares = ", ".join(f"{100 * share:.0f} %" for share in balancer.shares)
            self._progress.add_event("note", f"shares of the batch by node: {shares}")

    def _describe_last_step(self) -> tuple[np.ndarray, ReplicaCheckResult | None]:
        spans = self._progress.recorder.merge_recent_spans()
        return spans[spans["step"] == spans["step"].max(initial=-1)], self.replica_check.checker.result

    def _on_stream_end(self) -> None:
        """End the run here, because a stream without length has ended on all ranks. The stream is one epoch."""
        progress = self._progress
        progress.needs_resync = True
        progress.target_step = progress.step
        progress.plan = progress.plan.end_at(progress.step, steps_per_epoch=max(1, progress.step))
        progress.add_event("note", f"the stream ended after {progress.step:,} steps")

    def _on_nonfinite(self, results: Sequence[DispatchResult]) -> None:
        progress = self._progress
        progress.needs_resync = True
        ruined_step = find_ruined_step(progress.history)
        failures = build_nonfinite_failures(
            progress.step,
            results,
            self._engine_group.nodes,
            ruined_step=ruined_step,
            large_loss=find_large_loss(progress.history),
        )
        progress.pause_for(NonFiniteError(failures, choose_remedy(progress.step, results, ruined_step)))
        progress.add_event("error", f"not finite at step {progress.step:,}; all nodes paused before the update")

    def _on_cancel(self, dispatch: StepRequest, step: int) -> None:
        self.lr_updater.on_cancel(dispatch.lr_change, step, self._progress.step)

    def _on_failure(self, dispatch: StepRequest, step: int, error: EngineError) -> None:
        self._on_cancel(dispatch, step)  # callers that wait for the learning rate are answered when the run ends
        self._fail(error)


def _follow(mean: float, value: float) -> float:
    """Return a mean that follows new values slowly."""
    return 0.8 * mean + 0.2 * value


def _get_slowest_step_s(results: Sequence[DispatchResult]) -> float:
    """Return the slowest rank's median of seconds per step."""
    return max(float(np.median(np.asarray(result.rows)["step_s"])) for result in results)

"""What a run does between two steps: evaluate, call callbacks, keep a snapshot, write a checkpoint, compare replicas.

All are a :class:`BoundaryAction`. At one step they are done in this order::

    evaluation    sent ahead of the next step; callbacks and checkpoints may depend on it
    callbacks     called once nothing is in flight; no step is sent before they return
    snapshot      kept in the engines' memory
    checkpoint    written to disk, from the snapshot where one was just taken
    replicas      compared by checksums that a dispatch returns with its results

An evaluation that was interrupted is due again before the next step. That some ranks have evaluated already does no
harm: see :meth:`dtkit.engine.lr_schedule.LearningRates.held_out`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any, Protocol

from dtkit.checkpoint.manager import CheckpointManager, CheckpointRequest
from dtkit.errors import format_ranks
from dtkit.training.callbacks import CallbackRunner
from dtkit.training.config import SnapshotInterval
from dtkit.training.pending_calls import PendingCall
from dtkit.training.replica_check import ReplicaChecker
from dtkit.training.resume import collect_callback_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dtkit.errors import EngineError
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.training.pending_calls import PendingCalls
    from dtkit.training.progress import RunProgress
    from dtkit.types import DispatchResult

DEFAULT_INTERVAL_S, MAX_INTERVAL_S = 10.0, 30.0  # between two snapshots in memory
_MAX_TIME_FRACTION = 0.01  # of the time, that training may wait for snapshots
_NEVER_DUE = 2**31


class BoundaryAction(Protocol):
    """Something that a run does between two steps. The run's driver alone calls it."""

    def is_due(self, step: int) -> bool:
        """Return whether to do it after this step."""
        ...

    def steps_until_due(self, step: int) -> int:
        """Return how many steps may be sent at once before it is due again."""
        ...

    def perform(self, step: int) -> None:
        """Do it, or ask the engines for it."""
        ...


class EvaluationAction:
    """Evaluation on held-out data, at the end of every epoch and of the run."""

    def __init__(self, engine_group: EngineGroup, progress: RunProgress, calls: PendingCalls) -> None:
        self._progress, self._calls = progress, calls
        options = progress.plan.options
        self._is_enabled = options.validation is not None
        self._metrics = engine_group.dumps(dict(options.metrics), name="metrics") if self._is_enabled else b""
        self.last_evaluated_step = 0
        """The step of the last evaluation that was made."""
        self._last_requested_step = 0  # the same, with those in flight

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after this step: no evaluation of it is in flight or made."""
        if not self._is_enabled or step <= self._last_requested_step:
            return False
        plan = self._progress.plan
        return step % plan.steps_per_epoch == 0 or step == plan.steps

    def steps_until_due(self, step: int) -> int:
        """Return the steps that are left of the epoch."""
        return _count_steps_left(step, self._progress.plan.steps_per_epoch) if self._is_enabled else _NEVER_DUE

    def perform(self, step: int) -> None:
        """Ask all ranks for it."""
        plan = self._progress.plan
        assert plan.options.validation is not None
        self._last_requested_step = step
        call = PendingCall(
            "evaluate", step, self._on_result, functools.partial(self._on_failure, step), self._on_cancel
        )
        self._calls.send(call, **plan.make_evaluation_args(plan.options.validation.key, self._metrics))

    def _on_result(self, step: int, values: Sequence[Any]) -> None:
        self._mark_done(step)
        self._progress.recorder.record_evaluation(step, values)

    def _on_failure(self, step: int, error: EngineError) -> None:
        """Pause; the training itself is whole, and this evaluation is not asked for again."""
        self._mark_done(step)
        self._progress.pause_for(error)
        self._progress.add_event("error", f"the evaluation failed: {error}".partition("\n")[0])

    def _on_cancel(self) -> None:
        self._last_requested_step = self.last_evaluated_step

    def _mark_done(self, step: int) -> None:
        self.last_evaluated_step = step
        self._last_requested_step = max(self._last_requested_step, step)

    def reset_to(self, step: int, last_evaluated_step: int | None = None) -> None:
        """Continue from `step`: what was evaluated beyond it is due again, and beyond `last_evaluated_step`."""
        last = self.last_evaluated_step if last_evaluated_step is None else last_evaluated_step
        self.last_evaluated_step = self._last_requested_step = min(step, last)


class CallbackAction:
    """The user's callbacks, at the end of every epoch."""

    def __init__(
        self,
        progress: RunProgress,
        run_callbacks: Callable[[], None],
        report: Callable[[object, BaseException | None], None],
    ) -> None:
        self._progress, self._report = progress, report
        self.runner = CallbackRunner(run_callbacks if progress.plan.options.callbacks else None)

    def is_due(self, step: int) -> bool:
        """Return whether callbacks are to be called after this step, or are running."""
        return self.runner.is_due(step, self._progress.plan.steps_per_epoch)

    def steps_until_due(self, step: int) -> int:
        """Return the steps that are left of the epoch."""
        return _count_steps_left(step, self._progress.plan.steps_per_epoch) if self.runner.has_callbacks else _NEVER_DUE

    def perform(self, step: int) -> None:
        """Call them, unless they are running."""
        self.runner.start(step, self._report)

    def on_done(self, token: object, error: BaseException | None) -> None:
        """Callbacks have returned: pause where one has failed."""
        if self.runner.mark_done(token) and error is not None:
            self._progress.pause_for(error)
            text = f"a callback failed: {type(error).__name__}: {error}".partition("\n")[0]
            self._progress.add_event("error", text)


class SnapshotTracker:
    """When a run's next snapshot in its engines' memory is due.

    Snapshots are for strategies of which a rank holds the only copy of a part: see
    :mod:`dtkit.engine.state.peer_snapshots`. Training waits for them, so by default the interval grows until that is a
    hundredth of the time, up to the interval of those on disk (:mod:`dtkit.checkpoint.manager`).
    """

    def __init__(self, interval: SnapshotInterval | None = None) -> None:
        self.interval = interval or SnapshotInterval()
        self._last_request = 0, time.monotonic()
        self._is_due_now = False
        self._min_interval_s = 0.0  # from the time that the last one took
        self._has_warned = False

    def reset_to(self, step: int) -> None:
        """Continue from `step`, of which no engine holds a snapshot."""
        self._last_request, self._is_due_now = (step, time.monotonic()), step > 0

    def is_due(self, step: int) -> bool:
        """Return whether to take one after this step."""
        every, seconds = self.interval.every_steps, self.interval.every_seconds
        if self.interval.is_disabled or self._is_due_now:
            return self._is_due_now and not self.interval.is_disabled
        if step <= self._last_request[0]:
            return False
        if every is not None:
            return step % every == 0
        return time.monotonic() - self._last_request[1] >= max(seconds or 0.0, self._min_interval_s)

    def is_missing(self, step: int) -> bool:
        """Return whether steps were taken since the last one: a run that pauses may do so for long, or for good."""
        return not self.interval.is_disabled and step > self._last_request[0]

    def steps_until_due(self, step: int) -> int:
        """Return the steps until the next one is due."""
        every = self.interval.every_steps
        return _NEVER_DUE if every is None else _count_steps_left(step, every)

    def on_sent(self, step: int) -> None:
        """Note that one was asked for."""
        self._last_request, self._is_due_now = (step, time.monotonic()), False

    def on_cancel(self) -> None:
        """Note that ranks were not at that step: it is due again."""
        self._is_due_now = True

    def on_result(self, values: Sequence[Any]) -> str | None:
        """Note what the ranks answered; return a warning the first time that none could be kept."""
        self._min_interval_s = min(MAX_INTERVAL_S, max(value["seconds"] for value in values) / _MAX_TIME_FRACTION)
        error = values[0]["error"]
        if error is None or self._has_warned:
            return None
        self._has_warned = True
        return f"no snapshot is kept in memory, only on disk: {error}"


class SnapshotAction:
    """Snapshots in the engines' memory."""

    def __init__(self, progress: RunProgress, calls: PendingCalls) -> None:
        self.tracker = SnapshotTracker(progress.plan.options.snapshot_interval)
        self._progress, self._calls = progress, calls

    def is_due(self, step: int) -> bool:
        """Return whether to take one after this step."""
        return self.tracker.is_due(step)

    def steps_until_due(self, step: int) -> int:
        """Return the steps until the next one is due."""
        return self.tracker.steps_until_due(step)

    def perform(self, step: int) -> None:
        """Ask all ranks for it."""
        self.tracker.on_sent(step)
        call = PendingCall("take_snapshot", step, self._on_result, self._on_failure, self.tracker.on_cancel)
        self._calls.send(call)

    def perform_before_idle(self, step: int) -> bool:
        """Take one before the run pauses or ends, where steps were taken since the last; return whether one is sent."""
        is_wanted = not self._progress.lost_ranks and self.tracker.is_missing(step)
        if is_wanted:
            self.perform(step)
        return is_wanted

    def _on_result(self, _step: int, values: Sequence[Any]) -> None:
        warning = self.tracker.on_result(values)
        if warning is not None:
            self._progress.add_event("note", warning)

    def _on_failure(self, error: EngineError) -> None:
        self._progress.add_event("error", f"the snapshot in memory failed: {error}".partition("\n")[0])


class CheckpointAction:
    """Checkpoints on disk: those that a user asks for, by hand or by an interval, and those to recover from."""

    def __init__(
        self, progress: RunProgress, calls: PendingCalls, snapshot_folder: Path, on_change: Callable[[], None]
    ) -> None:
        self.manager = CheckpointManager(progress.history, on_change)
        options = progress.plan.options
        self.manager.policy = options.checkpoint_policy
        self.manager.snapshot_policy = dataclasses.replace(options.disk_snapshot_policy, folder=snapshot_folder)
        self._progress, self._calls = progress, calls

    def is_due(self, step: int) -> bool:
        """Return whether to write one after this step."""
        return self.manager.is_due(step, self._progress.plan.steps)

    def steps_until_due(self, step: int) -> int:
        """Return the steps until the next one is due."""
        return self.manager.steps_until_due(step)

    def perform(self, step: int, *, from_snapshot: bool = False) -> None:
        """Ask all ranks for it; `from_snapshot`: of the copy that they have just made."""
        request = self.manager.begin_next(step)
        if request is not None:
            call = PendingCall(
                "save_checkpoint",
                step,
                on_result=functools.partial(self.manager.on_result, request),
                on_failure=functools.partial(self._on_failure, request),
                on_cancel=functools.partial(self.manager.on_cancel, request),
            )
            self._calls.send(call, copied=from_snapshot, **request.make_args())

    def _on_failure(self, request: CheckpointRequest, error: EngineError) -> None:
        self.manager.on_failure(request, self._progress.step, error)  # the training itself is whole


class ReplicaCheckAction:
    """The comparison of replicas, by checksums that ride along with a dispatch."""

    def __init__(self, progress: RunProgress) -> None:
        self.checker = ReplicaChecker()
        self._progress = progress

    def is_due(self, step: int) -> bool:
        """Return whether the dispatch that ends at this step should bring checksums."""
        return self.checker.is_due(time.monotonic()) or step == self._progress.plan.steps

    def steps_until_due(self, step: int) -> int:  # noqa: ARG002 - it is due by time
        """Return that it never limits a dispatch."""
        return _NEVER_DUE

    def perform(self, step: int) -> None:  # noqa: ARG002 - the dispatch asks for it
        """Note that a dispatch asks for checksums."""
        self.checker.on_sent(time.monotonic())

    def on_result(self, results: Sequence[DispatchResult]) -> None:
        """Compare the checksums of all ranks, and report those that differ."""
        seconds = max(result.fingerprint_s for result in results)
        fingerprints = [result.fingerprint for result in results]
        is_news = self.checker.on_result(time.monotonic(), self._progress.step, fingerprints, seconds)
        check = self.checker.result
        if is_news and check is not None and check.differing_ranks:
            names = ", ".join(map(str, check.differing_ranks))
            where = "on all nodes" if check.num_holders is None else "on all nodes that hold the same ones"
            self._progress.add_event(
                "error", f"parameters are not equal {where}: {names} differ since step {check.differing_since}"
            )


class BoundaryActions:
    """All that one run does between two steps."""

    def __init__(
        self,
        progress: RunProgress,
        evaluation: EvaluationAction,
        callbacks: CallbackAction,
        snapshot: SnapshotAction,
        checkpoint: CheckpointAction,
    ) -> None:
        self.evaluation, self.callbacks = evaluation, callbacks
        self.snapshot, self.checkpoint = snapshot, checkpoint
        self._all: tuple[BoundaryAction, ...] = evaluation, callbacks, snapshot, checkpoint
        self._progress = progress
        checkpoint.manager.describe = self._describe_run

    def steps_until_due(self, step: int) -> int:
        """Return how many steps may be sent at once."""
        return min(action.steps_until_due(step) for action in self._all)

    def save_if_due(self, step: int, flush_lr: Callable[[], None]) -> None:
        """Take a snapshot and write a checkpoint, so far as they are due.

        A checkpoint asked for by hand goes first, with a copy of its own: its caller wants to know what is wrong with
        the state. `flush_lr` sends a learning rate that was set before.
        """
        is_checkpoint_due = self.checkpoint.is_due(step)
        if is_checkpoint_due:
            flush_lr()
        from_snapshot = not self.checkpoint.manager.has_requests and self.snapshot.is_due(step)
        if from_snapshot:
            self.snapshot.perform(step)
        if is_checkpoint_due:
            self.checkpoint.perform(step, from_snapshot=from_snapshot)

    def save_when_idle(self, calls: PendingCalls, flush_lr: Callable[[], None], *, is_running: bool) -> bool:
        """Write the checkpoints that are due, with nothing in flight; return whether anything is now.

        An evaluation and callbacks that are due come first. With ranks lost no checkpoint can be written, and
        whoever waits for one gets an error.
        """
        progress, manager = self._progress, self.checkpoint.manager
        step = progress.step
        comes_later = progress.stop_request or self.evaluation.is_due(step) or self.callbacks.is_due(step)
        if progress.lost_ranks:
            lost = format_ranks(progress.lost_ranks)
            manager.cancel_requests(f"lost: {lost}; run.resume() or run.repair() replaces what is lost")
        elif manager.has_requests or (is_running and not comes_later):
            self.save_if_due(step, flush_lr)
            while manager.has_requests and not calls.pending:  # one that can't be begun holds up no other
                self.save_if_due(step, flush_lr)
        return bool(calls.pending)

    def _describe_run(self) -> dict[str, Any]:
        """Return what a checkpoint says of the run, besides its state on the engines."""
        plan = self._progress.plan
        description = {
            "spec": dataclasses.asdict(plan.spec),
            "called": self.callbacks.runner.last_called_step,
            "callbacks": collect_callback_states(plan.options.callbacks),
        }
        if plan.options.validation is not None:
            description["evaluated"] = self.evaluation.last_evaluated_step
        return description

    def rewind(self, step: int) -> None:
        """All ranks are at `step` again, in jobs that were built again."""
        self.evaluation.reset_to(step)
        self.snapshot.tracker.reset_to(step)

    def restore(self, step: int, last_callback_step: int, last_evaluation_step: int) -> None:
        """Continue an earlier run from `step`."""
        self.callbacks.runner.last_called_step = last_callback_step
        self.evaluation.reset_to(step, last_evaluation_step)
        self.checkpoint.manager.reset_to(step)
        self.snapshot.tracker.reset_to(step)


def _count_steps_left(step: int, every: int) -> int:
    return every - step % every

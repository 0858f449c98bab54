"""Actions of a run between two steps: evaluation, callbacks, snapshots, checkpoints, and replica checks.

Each is a :class:`BoundaryAction`. At one step they are performed in this order::

    evaluation    sent ahead of the next step; callbacks and checkpoints may depend on it
    callbacks     called once nothing is in flight; no step is sent before they return
    snapshot      kept in the engines' memory
    checkpoint    written to disk, from the snapshot where one was just taken
    replicas      compared by checksums that a dispatch returns with its results

An interrupted evaluation is due again before the next step. It is harmless if some ranks have evaluated already: see
:meth:`dtkit.engine.lr_schedule.LearningRates.step_after_evaluation`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any, Protocol

from dtkit._util.formatting import name_nodes, name_nodes_at_start
from dtkit.checkpoint.manager import CheckpointManager, CheckpointRequest
from dtkit.errors import RunError, format_ranks
from dtkit.rpc import pickling
from dtkit.rpc.protocol import StateOperations, make_call
from dtkit.training.callbacks import CallbackRunner, describe_callback_error
from dtkit.training.pending_calls import PendingCall
from dtkit.training.replica_check import ReplicaChecker
from dtkit.training.resume import collect_callback_states
from dtkit.training.snapshot_tracker import NEVER_DUE, SnapshotTracker, count_steps_left

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dtkit.errors import EngineError
    from dtkit.messages import CheckpointReport, DispatchResult
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.protocol import Call
    from dtkit.training.pending_calls import PendingCalls
    from dtkit.training.progress import RunProgress


class BoundaryAction(Protocol):
    """An action of a run between two steps. Only the run's driver calls it."""

    def is_due(self, step: int) -> bool:
        """Return whether to do it after this step."""
        ...

    def steps_until_due(self, step: int) -> int:
        """Return how many steps may be sent at once before it is due again."""
        ...

    def perform(self, step: int) -> None:
        """Perform the action, or request it from the engines."""
        ...


class EvaluationAction:
    """Evaluation on held-out data, at the end of every epoch, or of every few, and of the run."""

    def __init__(self, engine_group: EngineGroup, progress: RunProgress, calls: PendingCalls) -> None:
        self._progress, self._calls = progress, calls
        options = progress.plan.options
        self._is_enabled = options.validation is not None
        metrics = dict(options.metrics)
        self.pickled_metrics = engine_group.uploads.dumps(metrics, name="metrics") if metrics else pickling.dumps({})
        """The run's metrics, pickled once: looking for the modules that they need takes a millisecond."""
        self.last_evaluated_step = 0
        """The step of the last evaluation that was made."""
        self._last_requested_step = 0  # the same, with those in flight

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after this step, of which no evaluation is in flight or complete."""
        if not self._is_enabled or step <= self._last_requested_step:
            return False
        plan = self._progress.plan
        return step % plan.steps_per_evaluation == 0 or step == plan.steps

    def steps_until_due(self, step: int) -> int:
        """Return the remaining steps of the epoch, or of the last of several ones."""
        return count_steps_left(step, self._progress.plan.steps_per_evaluation) if self._is_enabled else NEVER_DUE

    def perform(self, step: int) -> None:
        """Send the request to all ranks."""
        plan = self._progress.plan
        assert plan.options.validation is not None
        self._last_requested_step = step
        call = plan.make_evaluation_call(plan.options.validation, self.pickled_metrics, step)
        on_failure = functools.partial(self._on_failure, step)
        self._calls.send(PendingCall(call, step, self._on_result, on_failure, self._on_cancel))

    def _on_result(self, step: int, values: Sequence[Any]) -> None:
        self._mark_done(step)
        recorder = self._progress.recorder
        if step >= self._progress.plan.steps:
            recorder.boundary_times.record_last_validation(step)
        recorder.record_evaluation(step, values)

    def _on_failure(self, step: int, error: EngineError) -> None:
        """Pause. The training itself is intact, and this evaluation is not repeated."""
        self._mark_done(step)
        self._progress.pause_for(error)
        self._progress.add_event("error", f"the evaluation failed: {name_nodes_at_start(str(error))}")

    def _on_cancel(self) -> None:
        self._last_requested_step = self.last_evaluated_step

    def _mark_done(self, step: int) -> None:
        self.last_evaluated_step = step
        self._last_requested_step = max(self._last_requested_step, step)

    def reset_to(self, step: int, last_evaluated_step: int | None = None) -> None:
        """Continue from `step`. Later evaluations, and those after `last_evaluated_step`, are due again."""
        last = self.last_evaluated_step if last_evaluated_step is None else last_evaluated_step
        self.last_evaluated_step = self._last_requested_step = min(step, last)


class CallbackAction:
    """The user's callbacks, at the end of every epoch."""

    def __init__(
        self,
        progress: RunProgress,
        run_callbacks: Callable[[], None],
        submit: Callable[[str, object], object],
    ) -> None:
        self._progress, self._submit = progress, submit
        self.runner = CallbackRunner(run_callbacks if any(map(callable, progress.plan.options.callbacks)) else None)

    def is_due(self, step: int) -> bool:
        """Return whether to call callbacks after this step, or whether they are running."""
        return self.runner.is_due(step, self._progress.plan.steps_per_epoch)

    def steps_until_due(self, step: int) -> int:
        """Return the remaining steps of the epoch."""
        return count_steps_left(step, self._progress.plan.steps_per_epoch) if self.runner.has_callbacks else NEVER_DUE

    def perform(self, step: int) -> None:
        """Call the callbacks, unless they are running."""
        self.runner.start(step, self._report)

    def _report(self, token: object, error: BaseException | None) -> None:
        """Tell the run that callbacks have returned. If one of them has ended the run, log the error of another."""
        try:
            self._submit("callbacks_done", (token, error))
        except RunError:
            if error is not None:
                self._progress.add_event("error", describe_callback_error(error))

    def on_done(self, token: object, error: BaseException | None) -> None:
        """Note that callbacks have returned, and pause if one has failed."""
        is_waited_for = self.runner.mark_done(token)
        if is_waited_for:
            self._progress.recorder.boundary_times.add_callbacks(self.runner.last_s)
        if is_waited_for and error is not None:
            self.pause_after(error)

    def pause_after(self, error: BaseException) -> None:
        """Pause, because a callback has failed."""
        self._progress.pause_for(error)
        self._progress.add_event("error", describe_callback_error(error))


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
        """Send the request to all ranks."""
        self.tracker.on_sent(step)
        call = make_call(StateOperations.take_snapshot, job=self._progress.plan.job, step=step)
        self._calls.send(PendingCall(call, step, self._on_result, self._on_failure, self.tracker.on_cancel))

    def perform_before_idle(self, step: int, *, is_brief: bool = False) -> bool:
        """Request one before the run pauses or ends, if there were steps since the last.

        Single steps don't wait for each one: with `is_brief`, a minimum of time must have passed since the last. Return
        whether one was requested.
        """
        is_wanted = not self._progress.lost_ranks and self.tracker.is_missing(step, is_brief=is_brief)
        if is_wanted:
            self.perform(step)
        return is_wanted

    def _on_result(self, _step: int, values: Sequence[Any]) -> None:
        warning = self.tracker.on_result(values)
        if warning is not None:
            self._progress.add_event("note", name_nodes(warning))

    def _on_failure(self, error: EngineError) -> None:
        self._progress.add_event("error", f"the snapshot in memory failed: {error}".partition("\n")[0])


class CheckpointAction:
    """Checkpoints on disk: those that the user requests, directly or by an interval, and those for recovery."""

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
        """Send the request to all ranks. With `from_snapshot`, they write the copy that they have just made."""
        checkpoint = self.manager.begin_next(step)
        if checkpoint is not None:
            call = PendingCall(
                make_save_call(self._progress.plan.job, step, checkpoint, from_snapshot=from_snapshot),
                step,
                on_result=functools.partial(self.manager.on_result, checkpoint),
                on_failure=functools.partial(self._on_failure, checkpoint),
                on_cancel=functools.partial(self.manager.on_cancel, checkpoint),
            )
            self._calls.send(call)

    def _on_failure(self, checkpoint: CheckpointRequest, error: EngineError) -> None:
        self.manager.on_failure(checkpoint, self._progress.step, error)  # the training itself is intact


def make_save_call(
    job: str, step: int, checkpoint: CheckpointRequest, *, from_snapshot: bool = False
) -> Call[CheckpointReport]:
    """Return the call that lets all ranks begin to write a checkpoint."""
    return make_call(
        StateOperations.save_checkpoint,
        job=job,
        step=step,
        folder=str(checkpoint.folder),
        token=checkpoint.token,
        from_snapshot=from_snapshot,
        may_stage=checkpoint.is_fetched,
    )


class ReplicaCheckAction:
    """The comparison of replicas, by checksums in the results of a dispatch."""

    def __init__(self, progress: RunProgress) -> None:
        self.checker = ReplicaChecker()
        self._progress = progress
        self._last_pause_step = -1  # before any step

    def is_due(self, step: int) -> bool:
        """Return whether the dispatch that ends at this step should return checksums."""
        return self.checker.is_due(time.monotonic()) or step in (self._last_pause_step, self._progress.plan.steps)

    def steps_until_due(self, step: int) -> int:  # noqa: ARG002 - it is due by time
        """Return `NEVER_DUE`: it never limits a dispatch."""
        return NEVER_DUE

    def perform(self, step: int) -> None:  # noqa: ARG002 - the dispatch asks for it
        """Note that a dispatch requests checksums."""
        self.checker.on_sent(time.monotonic())

    def request_at_pause(self) -> bool:
        """Let a dispatch without steps return checksums, if the known ones are older. Return whether they are."""
        check, step = self.checker.result, self._progress.step
        is_older = check is not None and check.step != step != self._last_pause_step
        self._last_pause_step = step
        return is_older

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
    """All boundary actions of one run."""

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

    def is_any_due(self, step: int) -> bool:
        """Return whether anything is to be done after this step, of what has not been requested."""
        return any(action.is_due(step) for action in self._all)

    def save_if_due(self, step: int, flush_lr: Callable[[], None]) -> None:
        """Take a snapshot and write a checkpoint if they are due.

        A checkpoint that the user requested goes first and copies the state itself, so that its caller gets any error.
        `flush_lr` sends a learning rate that was set before.
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
        """Request the checkpoints that are due while nothing is in flight. Return whether anything is in flight now.

        An evaluation and callbacks that are due come first. While ranks are lost, no checkpoint can be written, and
        callers that wait for one get an error.
        """
        progress, manager = self._progress, self.checkpoint.manager
        step = progress.step
        comes_later = progress.stop_request or self.evaluation.is_due(step) or self.callbacks.is_due(step)
        if progress.lost_ranks:
            lost = format_ranks(progress.lost_ranks)
            manager.cancel_requests(f"lost: {lost}; run.resume() or run.repair() replaces what is lost")
        elif manager.has_requests or (is_running and not comes_later):
            self.save_if_due(step, flush_lr)
            while manager.has_requests and not calls.pending:  # one that can't begin must not delay the others
                self.save_if_due(step, flush_lr)
        return bool(calls.pending)

    def _describe_run(self) -> dict[str, Any]:
        """Return a checkpoint's entries about the run, besides the state on the engines."""
        plan = self._progress.plan
        description = {
            "spec": dataclasses.asdict(plan.spec),
            "elapsed_s": self._progress.elapsed_s,
            "called": self.callbacks.runner.last_called_step,
            "callbacks": collect_callback_states(plan.options.callbacks),
        }
        if plan.options.validation is not None:
            description["evaluated"] = self.evaluation.last_evaluated_step
        return description

    def rewind(self, step: int) -> None:
        """Go back to `step`, to which all ranks have returned in rebuilt jobs."""
        self.evaluation.reset_to(step)
        self.snapshot.tracker.reset_to(step)

    def restore(self, step: int, last_callback_step: int, last_evaluation_step: int) -> None:
        """Continue an earlier run from `step`."""
        self.callbacks.runner.last_called_step = last_callback_step
        self.evaluation.reset_to(step, last_evaluation_step)
        self.checkpoint.manager.reset_to(step)
        self.snapshot.tracker.reset_to(step)

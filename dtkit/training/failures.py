"""Reaction of a run to a failed call: continue after an interrupt or a lost engine, end after a user's error.

====================================  ============================================================================
failure                               what follows
====================================  ============================================================================
another notebook owns the cluster     the run ends here, and stays as it is for the other notebook
refused, after the ranks moved        nothing: the driver continues from the step that the ranks are at
an engine is lost                     repair: it is replaced or left out; or a pause, with ``on_failure="pause"``
interrupted, or refused once          resync: form the group again, and repair where ranks are out of sync
an error of the user's code           resync, so that the cluster is usable, and the run ends
====================================  ============================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import timeouts
from dtkit._util.formatting import format_count, format_elapsed, name_nodes, name_nodes_at_start
from dtkit.errors import DtkitError, EmptyEnginesError, EngineError, SupersededError, drop_consequential_refusals
from dtkit.history import engine_outbox
from dtkit.rpc.transport import REPAIR_REMEDY
from dtkit.training import recovery
from dtkit.training.recovery import Recovery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.history.history import History
    from dtkit.messages import Reply
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.training.pending_calls import PendingCall, PendingCalls
    from dtkit.training.progress import RunProgress
    from dtkit.training.recovery import RecoveryResult
    from dtkit.types import EngineLoss, Event, Failure

_MAX_RETRIES = 3  # most failed calls in a row, without a step between them
_MAX_ENGINE_LOSSES = 3  # most losses in a row at one step; replacements would be lost for the same reason
_MAX_SEARCHED_ROWS = 100_000  # of the history's end; a lost engine's last steps are among them

_RESUME_REMEDY = "run.resume(), or the button Resume, starts another one in its place and continues"

_SUPERSEDED_MESSAGE = (
    "another notebook, or this one by attaching again, has taken this cluster over, and the run with it, after step "
    "{step}. This run shows what was until then; dtkit.attach(name, force=True) takes it back"
)


class FailureHandler:
    """Decides how one run continues after a failed call."""

    def __init__(
        self,
        engine_group: EngineGroup,
        progress: RunProgress,
        calls: PendingCalls,
        snapshot_folder: Path,
        *,
        rewind: Callable[[int], None],
        fail: Callable[[BaseException], None],
        on_change: Callable[[], None],
    ) -> None:
        self._engine_group, self._progress, self._calls = engine_group, progress, calls
        self._snapshot_folder = snapshot_folder
        self._rewind, self._fail, self._on_change = rewind, fail, on_change
        self._last_loss_step = -1  # the step of the last loss of engines
        self._loss_count = 0  # losses in a row at that step
        self._settled_from = math.inf  # the step at which a call failed, from which on evaluations may be unread
        self._losses: list[EngineLoss] = []  # the last ones
        self._queue_text = ""  # the last state of a job in a scheduler's queue

    def handle(self, call: PendingCall[Any], replies: Sequence[Reply[Any]], failures: Sequence[Failure]) -> None:
        """Continue after the failures of a call, or end the run."""
        if any(failure.type == "SupersededError" for failure in failures):
            self._on_superseded(call)
        elif all(failure.kind == "refused" for failure in failures) and self._progress.needs_resync:
            call.on_cancel()
        else:
            self._settle(replies, failures)
            self._continue_or_fail(call, failures)

    def _on_superseded(self, call: PendingCall[Any]) -> None:
        self._calls.cancel_all()
        call.on_cancel()
        self._progress.history.close_run_log()  # the other notebook writes to it
        self._fail(SupersededError(_SUPERSEDED_MESSAGE.format(step=self._progress.step)))

    def _settle(self, replies: Sequence[Reply[Any]], failures: Sequence[Failure]) -> None:
        """Collect the results of all calls in flight, without sending others."""
        progress = self._progress
        progress.needs_resync = True
        progress.retry_count += 1
        self._settled_from = min(self._settled_from, progress.step)
        progress.recorder.clear_extra_rows()
        gone = _find_gone(failures)
        self._record_common_steps(dict(enumerate(replies)), gone)
        is_stuck = any(failure.kind == "stuck" for failure in failures)
        timeout = timeouts.INTERRUPTED_GATHER_TIMEOUT_S if is_stuck else timeouts.GATHER_TIMEOUT_S
        for late_replies in self._calls.gather_late_replies(gone, timeout):
            self._record_common_steps(late_replies, gone)
        self._calls.cancel_all()
        self._calls.stall_detector.reset()

    def _record_common_steps(self, replies: Mapping[int, Reply[Any]], gone: set[int]) -> None:
        """Record the steps that all ranks completed before one failed. Those that are `gone` may have kept theirs."""
        folder, job = self._engine_group.folder, self._progress.plan.job
        unread = {rank: engine_outbox.read_dispatches(folder, job, rank) for rank in gone}
        common_step = self._progress.recorder.record_common_steps(replies, unread)
        if common_step is not None:
            self._progress.step = common_step

    def _continue_or_fail(self, call: PendingCall[Any], failures: Sequence[Failure]) -> None:
        errors = [failure for failure in failures if failure.kind == "error" and not failure.victim]
        lost_ranks = sorted(_find_gone(failures) | set(self._engine_group.membership.find_lost_ranks()))
        may_retry = self._calls.interruption.is_active or self._progress.retry_count < _MAX_RETRIES
        if lost_ranks and not errors:
            call.on_cancel()
            self._on_lost_ranks(lost_ranks, failures)
        elif not errors and may_retry:
            call.on_cancel()
            self._resync()
        else:
            forming_error = self._resync()
            cause = EngineError(drop_consequential_refusals(failures))
            call.on_failure(cause if errors or forming_error is None else forming_error)

    # -- lost engines -----------------------------------------------------------------------------------------

    def _on_lost_ranks(self, lost_ranks: list[int], failures: Sequence[Failure]) -> None:
        """Replace the lost engines or continue without them; or pause until the user requests that."""
        progress = self._progress
        progress.lost_ranks = lost_ranks
        self._note_losses(lost_ranks, failures)
        self._loss_count = self._loss_count + 1 if progress.step == self._last_loss_step else 1
        self._last_loss_step = progress.step
        if progress.plan.options.on_failure == "pause":
            progress.pause_for(EngineError(list(map(_name_resume, failures))))
        elif self._loss_count > _MAX_ENGINE_LOSSES:
            times = f"engines were lost {self._loss_count} times in a row at step {progress.step:,}"
            progress.add_event("error", f"{times}: replacements would be lost too")
            self._fail(EngineError([_name_correction(failure, self._loss_count) for failure in failures]))
        else:
            self.repair()

    def _note_losses(self, lost_ranks: Sequence[int], failures: Sequence[Failure] = ()) -> None:
        """Note each lost engine with its host and the reason."""
        losses = self._engine_group.membership.explain_losses(lost_ranks, failures)
        self._losses = list(losses.values())
        for rank, loss in losses.items():
            self._progress.add_loss(rank, loss)

    def _add_causes(self, error: EmptyEnginesError) -> EmptyEnginesError:
        """Return the error with how the engines ended, if that is known: new ones may end in the same way."""
        causes = dict.fromkeys(loss.cause for loss in self._losses if loss.exit_code is not None)
        how = f". How an engine ended: {'; '.join(causes)}. If your code did that, correct it first" if causes else ""
        return EmptyEnginesError(f"{error}{how}")

    def repair(self, reason: str = "") -> None:
        """Bring all ranks to one step, with lost ones replaced or dropped. If that is impossible, end the run.

        `reason` is why a repair is necessary although no engine is lost.
        """
        progress = self._progress
        lost_ranks, old_step, old_world_size = progress.lost_ranks, progress.step, self._engine_group.world_size
        self._on_change()
        try:
            result = self.recover(lost_ranks)
        except EmptyEnginesError as error:
            self._fail(self._add_causes(error))
            return
        except (DtkitError, ValueError) as error:
            self._fail(error)
            return
        progress.rewind(result.step, result.lr)
        self._rewind(result.step)
        if result.lost_ranks:
            if gap := describe_missing_rows(progress.history, result.lost_ranks, result.step):
                progress.add_event("note", gap)
            self._note_repair(old_world_size, old_step, result)
        else:
            progress.add_event("note", _describe_rewind(old_step, result, name_nodes(reason)))

    def recover(self, lost_ranks: Sequence[int]) -> RecoveryResult:
        """Rebuild the job on all ranks, and adapt the plan to the remaining ranks."""
        progress, transport = self._progress, self._engine_group.transport
        transport.on_queue = self._note_queue
        recover = Recovery(
            self._engine_group,
            progress.plan,
            self._snapshot_folder,
            self._record_before_rebuild,
            self._note_further_losses,
        )
        result = recover(lost_ranks)
        progress.plan = progress.plan.adapt_to(self._engine_group.world_size)
        progress.history.ranks_per_replica = progress.plan.options.ranks_per_replica
        progress.delay_factors = {}  # the new jobs run at full speed
        return result

    def _record_before_rebuild(self, step: int) -> None:
        """Record what ranks did before `step`, from which a recovery continues: it ends what the engines keep."""
        first_unread = self._progress.recorder.next_step
        self._progress.recorder.record_before_rebuild(self._progress.plan.job, step)
        self._record_evaluations(first_unread, step)

    def _record_evaluations(self, first_unread: int, step: int) -> None:
        """Record the evaluations before `step` that engines made after the failure of an earlier call."""
        progress, ranks = self._progress, range(self._engine_group.world_size)
        folder, job = self._engine_group.folder, progress.plan.job
        kept = {rank: engine_outbox.read_evaluations(folder, job, rank) for rank in ranks}
        # that of `step` itself is made again
        unread = {rank: {at: sums for at, sums in found.items() if at < step} for rank, found in kept.items()}
        due = progress.plan.list_due_evaluations(min(first_unread, self._settled_from), step)
        progress.recorder.record_unread_evaluations(unread, due, step)
        self._settled_from = math.inf

    def _note_further_losses(self, losses: Mapping[int, EngineLoss]) -> None:
        """Note engines that were lost during the repair, also new ones at ranks that the log names already."""
        self._progress.forget_losses()
        for rank, loss in losses.items():
            self._progress.add_loss(rank, loss)
        self._on_change()

    def _note_queue(self, text: str) -> None:
        """Note each state of a job for which the repair waits."""
        if text != self._queue_text:
            self._queue_text = text
            self._progress.add_event("note", f"the repair waits: {text}")
            self._on_change()

    def record_repair(self, old_world_size: int, result: RecoveryResult) -> None:
        """Note a repair after the run's end. The job may now be at an earlier step."""
        progress = self._progress
        old_step = progress.step
        progress.rewind(result.step, result.lr)
        self._note_repair(old_world_size, old_step, result)

    def _note_repair(self, old_world_size: int, old_step: int, result: RecoveryResult) -> None:
        """Note which ranks were replaced or left out, since when, and what was lost with them."""
        action = "replaced" if self._engine_group.world_size == old_world_size else "left out"
        names = ", ".join(map(str, result.lost_ranks))
        num_lost = max(result.lost_steps, old_step - result.step)
        steps = "no step lost" if num_lost == 0 else f"{format_count(num_lost, 'step')} lost"
        nodes = f"node{'s' * (len(result.lost_ranks) > 1)} {names}"
        source = f" ({result.source})" if result.source else ""
        since_loss_s = measure_since_loss(self._progress.history.events, time.time(), at_least_s=result.duration_s)
        duration = format_elapsed(since_loss_s)
        lost = f"{steps}{self._describe_optimizer_state(action, result)}{self._describe_batch_statistics(result)}"
        self._progress.add_event(
            "repair",
            f"{nodes} {action}: all go on from step {result.step:,}{source} {duration} after the loss, {lost}",
            notice=f"{nodes} replaced in {duration}, {lost}" if action == "replaced" else None,
        )

    def _describe_optimizer_state(self, action: str, result: RecoveryResult) -> str:
        """Return a clause on momentum and moments, where each rank trains alone and so has its own."""
        has_own = not self._progress.plan.options.strategy.divides_batch
        is_lost = has_own and action == "replaced" and result.lost_ranks and not result.source
        return "; the optimizer's state there is the mean of the others'" if is_lost else ""

    def _describe_batch_statistics(self, result: RecoveryResult) -> str:
        """Return a clause on running statistics that only the lost ranks had; a snapshot has those of all ranks."""
        plan, is_on_gpu = self._progress.plan, self._engine_group.nodes[0].device.startswith("cuda")
        are_shared = is_on_gpu and getattr(plan.options.strategy, "sync_batch_norm", False)
        has_own = bool(plan.job_spec.model_handle.batch_norm_names) and not are_shared
        is_lost = has_own and result.lost_ranks and not result.source and not result.lost_steps
        return "; running statistics of BatchNorm there are lost" if is_lost else ""

    # -- engines that are all there ---------------------------------------------------------------------------

    def _resync(self) -> EngineError | None:
        """Form the group again after a failure in which no engine was lost, and bring all ranks to one step.

        Return the engines' error if they could not form the group.
        """
        progress = self._progress
        positions = recovery.query_positions(self._engine_group, progress.plan.job)
        progress.lost_ranks = [rank for rank in range(self._engine_group.world_size) if rank not in positions]
        if progress.lost_ranks or recovery.is_out_of_sync(positions):
            self._note_losses(progress.lost_ranks)
            self.repair(recovery.explain_out_of_sync(positions))
            return None
        progress.step = next(iter(positions.values())).step
        first_unread = progress.recorder.next_step
        progress.recorder.fill_gap(progress.plan.job, progress.step)
        self._record_evaluations(first_unread, progress.step)
        return self._reform_group()

    def _reform_group(self) -> EngineError | None:
        """Form the group, with a second attempt, since an interrupt may arrive late. Return the engines' error."""
        with contextlib.suppress(DtkitError):
            self._engine_group.membership.form_process_group()
            return None
        try:
            self._engine_group.membership.form_process_group()
        except DtkitError as error:
            message = name_nodes_at_start(str(error))
            self._progress.add_event("error", f"the process group could not be formed again: {message}")
            return error if isinstance(error, EngineError) else None
        return None


def _name_resume(failure: Failure) -> Failure:
    """Return a failure whose remedy is that of a paused run."""
    return dataclasses.replace(failure, message=failure.message.replace(REPAIR_REMEDY, _RESUME_REMEDY))


def _name_correction(failure: Failure, loss_count: int) -> Failure:
    """Return a failure whose remedy isn't another engine alone, after as many losses in a row."""
    remedy = (
        f"This happened {loss_count} times in a row at the same step, so another engine would end, too. Correct what "
        f"ends it, such as a crash or too little memory; then {REPAIR_REMEDY}"
    )
    return dataclasses.replace(failure, message=f"{failure.message.partition('. ')[0]}. {remedy}")


def measure_since_loss(events: Sequence[Event], now: float, *, at_least_s: float) -> float:
    """Return the seconds from the first loss since the last repair, which the dashboard's banner shows too.

    A repair whose loss has no event took `at_least_s`.
    """
    lost_at = now
    for event in reversed(events):
        if event.kind == "repair":
            break
        if event.kind == "lost":
            lost_at = event.time
    return max(at_least_s, now - lost_at)


def describe_missing_rows(history: History, lost_ranks: Sequence[int], step: int) -> str | None:
    """Return which steps before `step` a lost engine took and could not report any more; None if there are none."""
    rows = history.rows(max(0, len(history) - _MAX_SEARCHED_ROWS))
    for rank in lost_ranks:
        last = rows["step"][rows["rank"] == rank].max(initial=-1)
        missing = np.unique(rows["step"][(rows["step"] > last) & (rows["step"] < step)])
        if last >= 0 and len(missing):
            steps = f"step {missing[0]:,}" if len(missing) == 1 else f"steps {missing[0]:,} to {missing[-1]:,}"
            return (
                f"what node {rank} measured in {steps} went with its engine: losses and times there are those of the "
                "other nodes"
            )
    return None


def _find_gone(failures: Sequence[Failure]) -> set[int]:
    """Return the ranks that can't be called any more."""
    return {failure.rank for failure in failures if failure.is_engine_gone}


def _describe_rewind(old_step: int, result: RecoveryResult, reason: str) -> str:
    num_lost = old_step - result.step
    if num_lost <= 0:
        return f"all go on from step {result.step}, no step lost: {reason}"
    source = f" ({result.source})" if result.source else ""
    return f"all go back to step {result.step}, {format_count(num_lost, 'step')} lost{source}: {reason}"

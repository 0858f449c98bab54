"""A job: a model in training on this engine, advanced k steps at a time.

Between two dispatches model, optimizer, position in the data and random state stay here. A dispatch returns one row for
each step. Losses stay on the device until it ends; only then, clocks are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit.engine import checks, error_hints, node_info
from dtkit.engine.bad_rows import describe_bad_rows
from dtkit.engine.callbacks import CallbackList
from dtkit.engine.data.sources import to_device
from dtkit.engine.dispatch_votes import choose_vote_steps, return_false
from dtkit.engine.evaluation import check_metrics, evaluate_batches
from dtkit.engine.frozen_parameters import FrozenParameters
from dtkit.engine.lr_schedule import LearningRates
from dtkit.engine.observe.call_output import ignore_logged, redirect_log
from dtkit.engine.observe.clock import Clock
from dtkit.engine.observe.phase_timer import (
    build_blocked_times,
    build_messages,
    build_spans,
    group_steps,
    sum_durations,
)
from dtkit.engine.observe.step_scalars import StepScalars
from dtkit.engine.observe.system_monitor import MONITOR
from dtkit.engine.observe.training_position import POSITION
from dtkit.engine.parameter_range import find_largest_parameter
from dtkit.engine.rng import JobRng
from dtkit.engine.state.capture import capture_model
from dtkit.engine.step_guard import StepGuard
from dtkit.engine.step_records import CompletedStep, build_rows
from dtkit.messages import DispatchResult, NonFiniteReport
from dtkit.strategies.base import StepResult
from dtkit.strategies.module_modes import enter_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import ShardedBatches
    from dtkit.engine.data.iterable import IterableBatches
    from dtkit.engine.data.replica_link import ReplicaBatches
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.memory import PeakMemoryTracker
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.shards import ShardedState
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.planning.memory_report import MemoryUsage
    from dtkit.strategies.base import TrainingProgram, Worker

NUM_TIMELINE_STEPS = 2  # of each dispatch
_NUM_RECENT_STEPS = 50


class Job:
    """This rank's part of a model in training."""

    def __init__(
        self,
        model: torch.nn.Module,
        program: TrainingProgram,
        batch_source: ShardedBatches | IterableBatches | ReplicaBatches,
        context: WorkerContext,
        seed: int,
    ) -> None:
        """`model` has the same parameters on every rank; `seed` starts this rank's random numbers (dropout)."""
        self.step = 0
        self.loss_fn, self.context = program.loss_fn, context
        self.layout = {"strategy": type(program.strategy).__name__, "mesh": dict(context.mesh.axes)}
        """Kind of strategy, and mesh. With another layout, state of one rank can't return to that rank."""
        self.checkpoint_trainable_only = program.checkpoint_trainable_only
        """Whether checkpoints leave frozen parameters out."""
        self._batch_source = batch_source
        self._num_micro_batches = program.strategy.num_micro_batches
        self._rng = JobRng(seed, context.device)
        with self._rng:
            self._worker: Worker = program.strategy.setup(
                enter_training(model), self.loss_fn, program.optimizer, context
            )
            self._learning_rates = LearningRates(program, self._worker.optimizer)
            self._callbacks = CallbackList(program.on_engine, self._worker, *self._locate())
        self._frozen_parameters = FrozenParameters(self._worker.model)
        self._step_guard = StepGuard(self._worker.model, self._worker.optimizer)
        self.partially_updated = False
        """Whether an update began and did not end, so that the parameters are of no step."""
        self.notes = list(self._worker.notes)
        """Lines to show once the training runs."""
        self.last_step: int | None = None
        """The last step that was asked for; None if it is unknown."""
        self.step_report: Any = None
        """Report of the last step, if it was explained."""
        self._recent_step_s: list[float] = []
        self._completed_steps: list[CompletedStep] = []
        self._scalars = StepScalars()
        self._end_reason = "done"
        self._nonfinite = NonFiniteReport()
        self._step_start = (0, 0.0, 0)  # samples and learning rate of the current step, bytes sent before it
        self._sent_bytes: int | None = None  # up to now; None if something other than a step has sent bytes since

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._worker.optimizer.param_groups[0]["lr"])

    @property
    def placement(self) -> Any:
        """Table of the parts of the model by rank; None if all ranks hold equal parts."""
        return self._worker.placement

    def _locate(self) -> tuple[int, int]:
        """Return (rank, world size)."""
        group = self.context.group
        return (0, 1) if group is None else (group.rank, group.world_size)

    def set_lr(self, lr: float) -> None:
        """Set the first group's learning rate; scale those of other groups, and the schedule, in proportion."""
        self._learning_rates.set_lr(lr)

    def set_shares(self, shares: Sequence[float]) -> None:
        """Set each rank's share of every batch from now on."""
        self._batch_source.set_shares(shares)

    def inject_delay(self, factor: float) -> None:
        """Multiply this rank's computing time, by sleeping."""
        self.context.phases.delay_factor = factor

    # -- a dispatch -------------------------------------------------------------------------------------------

    def advance(
        self, num_steps: int, *, explain: bool = False, should_end_early: Callable[[], bool] = lambda: False
    ) -> None:
        """Take up to `num_steps` steps; :meth:`collect_results` returns the results, also after an exception.

        The dispatch ends early, at the same step on all ranks, if steps have become slow or `should_end_early` returns
        True on some rank. Each vote starts a step before its result is used. The first result is awaited before the
        first step, so that a dispatch that was queued can end without a step.
        """
        self._reset_results()
        vote_steps, begun = choose_vote_steps(num_steps), time.perf_counter()
        with self._rng, self._step_guard.guard_sigint(), self._scalars.collect():
            self._step_guard.begin_dispatch()
            is_ending = return_false if explain or not num_steps else self._start_vote(should_end_early())
            for k in range(num_steps):
                if is_ending():
                    self._end_reason = "time"
                    return
                is_ending = return_false
                if k + 1 in vote_steps:
                    is_ending = self._start_vote(
                        time.perf_counter() - begun > timeouts.MAX_DISPATCH_S or should_end_early()
                    )
                if not self._take_step(explain=explain):
                    is_ending()
                    return
            self._check_frozen_parameters()
        self._end_reason = "done"

    def _reset_results(self) -> None:
        self._completed_steps.clear()
        self.context.phases.reset()
        self.context.phases.clock.start_dispatch()
        MONITOR.start_dispatch()
        self._end_reason, self._nonfinite = "failed", NonFiniteReport()
        self._sent_bytes = self.step_report = None

    def _start_vote(self, flag: bool) -> Callable[[], bool]:  # noqa: FBT001 - the one value that is agreed upon
        """Start to ask whether any rank has the flag, and return a function that waits for the answer."""
        group, self._sent_bytes = self.context.group, None
        return (lambda: flag) if group is None or group.world_size == 1 else group.start_all_reduce_any(flag)

    def collect_results(self, *, fingerprint: bool = False) -> DispatchResult:
        """Return the results of the steps that the last `advance` completed, optionally with parameter checksums.

        If this raises, such as for want of memory, the next call returns them.
        """
        begun = time.perf_counter()
        checksums = self._worker.compute_fingerprint() if fingerprint else None
        fingerprint_s = time.perf_counter() - begun
        completed = self._completed_steps
        memory = node_info.read_used_memory(self.context.device)
        self.context.phases.clock.synchronize()
        events = [(done.step, self.context.phases.clock.read_events(done.events)) for done in completed]
        groups, num_steps = group_steps([each for _, each in events]), len(events)
        durations = sum_durations(groups, num_steps)
        rows = build_rows(completed, durations, self._locate()[0], self._batch_source.get_epoch, memory)
        self._recent_step_s = (self._recent_step_s + rows["step_s"][-_NUM_RECENT_STEPS:].tolist())[-_NUM_RECENT_STEPS:]
        messages = build_messages(groups, [done.step for done in completed])
        result = DispatchResult(
            rows,
            self.step,
            self.lr,
            self._end_reason,
            self._nonfinite,
            blocked_spans=build_blocked_times(groups, num_steps),
            messages=messages if len(messages) else None,
            scalars=self._scalars.take() | (MONITOR.take(completed[-1].step, self.last_step) if completed else {}),
            fingerprint=checksums,
            fingerprint_s=fingerprint_s,
            step_report=self.step_report,
            spans=build_spans(events[-NUM_TIMELINE_STEPS:], self._locate()[0], Clock()),  # the events have times now
        )
        self._completed_steps = []
        return result

    # -- a step -----------------------------------------------------------------------------------------------

    def _take_step(self, *, explain: bool) -> bool:
        """Take a step, and return whether it was taken. After an exception it is complete or undone."""
        self._worker.settle()
        self._step_guard.begin_step(self._worker.model)
        self._scalars.begin_step()
        self._rng.begin_step(self.step)
        try:
            completed = self._run_step(explain=explain)
        except BaseException:
            self._step_guard.defers_sigint = True
            self._settle_failed_step()
            raise
        if completed is None:
            return False
        self._completed_steps.append(completed)
        self.step += 1
        self._step_guard.commit_step()
        return True

    def _settle_failed_step(self) -> None:
        """Complete a failed step if its update was made; undo it if the update has not begun."""
        if self._step_guard.update_done:
            unknown = StepResult(None, 0.0, is_finite=True, grad_norm=math.nan)
            self._completed_steps.append(self._complete_step(self._worker.step_result or unknown))
            self._learning_rates.step_without_loss(self.step + 1, self._batch_source.steps_per_epoch)
            self.step += 1
        elif self._step_guard.partially_updated:
            self.partially_updated = True
        else:
            self.partially_updated = not self._step_guard.roll_back()

    def _run_step(self, *, explain: bool) -> CompletedStep | None:
        """Load the batches, and let the worker take the step. Return None if it was not taken."""
        self._worker.step_result = None
        if self._sent_bytes is None:  # otherwise the last step has counted them
            self._sent_bytes = self._count_sent_bytes()
        sent_bytes, lr = self._sent_bytes, self.lr
        POSITION.step, POSITION.steps_per_epoch = self.step, self._batch_source.steps_per_epoch
        self.context.phases.enter("data")
        counts = self._batch_source.count_samples(self.step)
        if not any(counts):  # a stream has ended, on all ranks at this step
            self._end_reason = "exhausted"
            return None
        samples = sum(counts[shard] for shard in self.context.shards)
        self._step_start = samples, lr, sent_bytes
        batches = self._load_batches()
        probe = self._make_probe(samples) if explain else None
        result = self._run_worker(batches, counts, probe)
        if not result.is_finite:
            self._record_nonfinite(result, batches)
            return None
        self._learning_rates.step_after_update(
            result, self.step + 1, self._batch_source.steps_per_epoch, self.context.group
        )
        self._callbacks.after_step(self.step + 1)
        if self._callbacks:
            self._check_frozen_parameters()
        if probe is not None:
            self.step_report = probe.build_report()
        return self._complete_step(result)

    def _check_frozen_parameters(self) -> None:
        if not self.loss_fn.is_manual:  # those sum what the optimizers have
            self._frozen_parameters.check(self._worker.model)

    def _run_worker(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None
    ) -> StepResult:
        try:
            result = self._worker.step_result = self._worker.step(batches, counts, probe)
        except Exception as error:
            checks.add_batch_norm_hint(error)
            error_hints.add_hints(error, batches, self._worker.model)
            raise
        return result

    def _record_nonfinite(self, result: StepResult, batches: Sequence[tuple[int, Any]]) -> None:
        # Without weight the mean is 0 / 0, which doesn't mean that this rank's samples are to blame.
        loss = None if result.loss is None or not float(result.loss_weight) else float(result.loss)
        self._end_reason = "nonfinite"
        self._nonfinite = NonFiniteReport(
            loss,
            result.nonfinite,
            describe_bad_rows(batches, self._batch_source.get_rows(self.step)),
            find_largest_parameter(self._worker.model),
        )

    def _complete_step(self, step_result: StepResult) -> CompletedStep:
        """Return the record of the current step, which ends now."""
        samples, lr, sent_bytes = self._step_start
        self._scalars.end_step(self.step, samples)
        events, self._sent_bytes = self.context.phases.end_step(), self._count_sent_bytes()
        return CompletedStep(self.step, samples, lr, step_result, events, self._sent_bytes - sent_bytes)

    def _load_batches(self) -> Sequence[tuple[int, Any]]:
        if self._worker.batch_per_shard:
            batches = self._batch_source.load_batches_by_shard(self.step)
        else:
            batches = self._batch_source.load_batches(self.step, self._num_micro_batches)
        return [(count, to_device(batch, self.context.device, self.context.float_dtype)) for count, batch in batches]

    def _make_probe(self, num_samples: int) -> StepProbe:
        epoch = self._batch_source.get_epoch(self.step)
        probe = self._worker.make_step_probe(rank=self._locate()[0], step=self.step, epoch=epoch)
        probe.record_rows(self._batch_source.get_rows(self.step), num_samples)
        return probe

    def _count_sent_bytes(self) -> int:
        return 0 if self.context.group is None else self.context.group.count_sent_bytes()

    # -- between dispatches -----------------------------------------------------------------------------------

    def median_step_s(self) -> float:
        """Return the median time of recent steps; 0 before the first."""
        return statistics.median(self._recent_step_s) if self._recent_step_s else 0.0

    def measure_memory(self, tracker: PeakMemoryTracker, snapshot_bytes: int) -> MemoryUsage:
        """Return the memory that this rank's part of the job uses, including snapshots of a given size."""
        return tracker.measure_usage(self._worker.model, self._worker.optimizer, snapshot_bytes)

    def visit_state(self, visitor: StateVisitor) -> None:
        """Show all state on which the next step depends. Its rows follow from the step number. A collective."""
        self.step = visitor.visit_value("step", self.step)
        self._worker.visit_state(visitor)
        self._learning_rates.visit_state(visitor)
        self._rng.visit_state(visitor, self.step)
        self._callbacks.visit_state(visitor, self.step)

    def visit_worker(self, visitor: StateVisitor) -> None:
        """Show the state of model and optimizer. A collective."""
        self._worker.visit_state(visitor)

    def visit_model(self, visitor: StateVisitor) -> None:
        """Show the model's state. A collective."""
        self._worker.visit_model(visitor)

    def state_dict_parts(self, callback: int | None = None) -> ShardedState:
        """Return a copy of this rank's part of the model's state dict, or of one `callback`'s model. A collective."""
        with contextlib.nullcontext() if callback is None else self._callbacks.apply(callback):
            return capture_model(self)

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group."""
        if self.context.group is not None:
            self.context = dataclasses.replace(self.context, group=group)
            self._worker.set_process_group(group)
            self._callbacks.is_stale = True
            self._batch_source.set_process_group(group)

    def close(self) -> None:
        """End the threads or processes that load batches."""
        self._batch_source.close()

    def evaluate(
        self,
        batches: Iterable[tuple[int, Any]],
        metrics: dict[str, Callable[..., Any]],
        max_batches: int = 0,
        *,
        after_epoch: bool = False,
    ) -> tuple[int, dict[str, tuple[float, float]]]:
        """Return (samples, {name: (weighted sum, weight)}) of this rank's part of held-out data. A collective.

        `batches` yields (samples, batch); `max_batches` is the largest number of batches of any rank. With
        `after_epoch`, a schedule that needs a metric takes its step.
        """
        check_metrics(metrics, self.loss_fn)
        with self._worker.eval_mode() as forward, self._rng.preserve_states(), redirect_log(ignore_logged):
            padded = self._pad_batches(batches, max_batches)
            samples, sums = evaluate_batches(forward, padded, metrics, self.context)
        if after_epoch and self.step % self._batch_source.steps_per_epoch == 0:
            self._learning_rates.step_after_evaluation(self.step, *sums["loss"], self.context.group)
        return samples, sums

    def _pad_batches(self, batches: Iterable[tuple[int, Any]], max_batches: int) -> Iterator[tuple[int, Any]]:
        """Yield the batches, then batches of 0 samples where all ranks must call their models equally often."""
        num_batches = 0
        for num_batches, pair in enumerate(batches, 1):  # noqa: B007 - used after the loop
            yield pair
        if self._worker.forward_is_collective and self.context.make_sample_batch is not None:
            yield from ((0, self.context.make_sample_batch(1)) for _ in range(max_batches - num_batches))

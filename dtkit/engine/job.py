"""A job: a model in training on this engine, advanced k steps at a time.

Between two dispatches everything stays here: model, optimiser, where the data stands, random state. A dispatch
returns one row a step. Losses stay on the device, and clocks are read, only when the dispatch ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtkit.engine import checks, node_info, rng
from dtkit.engine.data.sources import to_device
from dtkit.engine.lr_schedule import LearningRates
from dtkit.engine.observe.phase_timer import (
    PhaseEvents,
    build_blocked_times,
    build_messages,
    build_spans,
    compute_durations,
)
from dtkit.engine.step_guard import StepGuard
from dtkit.history.comm_time import MESSAGE_PHASES
from dtkit.history.history import ROW_DTYPE
from dtkit.strategies.base import StepResult
from dtkit.types import DispatchResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import ShardedBatches
    from dtkit.engine.data.iterable import IterableBatches
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.memory import PeakMemoryTracker
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.planning.memory_report import MemoryUsage
    from dtkit.strategies.base import TrainingProgram, Worker
    from dtkit.strategies.loss import EvalOutput
    from dtkit.types import NonFiniteLocations

NUM_TIMELINE_STEPS = 2  # of a dispatch, of which the timeline shows everything
MAX_DISPATCH_S = 2.0  # a dispatch that has lasted so long ends at the next agreed step


@dataclasses.dataclass(frozen=True)
class _CompletedStep:
    """A step that was taken."""

    step: int
    samples: int
    lr: float
    step_result: StepResult
    events: PhaseEvents
    sent_bytes: int


class Job:
    """One model in training: this rank's part."""

    def __init__(
        self,
        model: torch.nn.Module,
        program: TrainingProgram,
        batch_source: ShardedBatches | IterableBatches,
        context: WorkerContext,
        seed: int,
    ) -> None:
        """`model` has the same parameters on every rank; `seed` starts this rank's random numbers (dropout)."""
        self.step = 0
        self.loss_fn, self.context = program.loss_fn, context
        self.layout = {"strategy": type(program.strategy).__name__, "mesh": dict(context.mesh.axes)}
        """On another one, state that is a rank's own belongs to nobody."""
        self._batch_source = batch_source
        self._num_micro_batches = program.strategy.num_micro_batches
        self._rng = _JobRng(seed, context.device)
        with self._rng:
            self._worker: Worker = program.strategy.setup(model.train(), self.loss_fn, program.optimizer, context)
            self._learning_rates = LearningRates(program, self._worker.optimizer)
        self._step_guard = StepGuard(self._worker.model, self._worker.optimizer, context.device)
        self.partially_updated = False
        """Whether an update began and did not end: this rank's parameters are of no step."""
        self.max_gradients: dict[str, torch.Tensor] | None = None
        self.step_report: Any = None
        """Of the last step, if it was explained."""
        self._recent_step_s: list[float] = []
        self._completed_steps: list[_CompletedStep] = []
        self._end_reason = "done"
        self._nonfinite_loss: float | None = None
        self._nonfinite: NonFiniteLocations = ()
        self._step_start = (0, 0.0, 0)  # of the step that is being taken: samples, learning rate, bytes sent before it

    @property
    def lr(self) -> float:
        """The first parameter group's learning rate."""
        return float(self._worker.optimizer.param_groups[0]["lr"])

    @property
    def placement(self) -> Any:
        """Which part of the model lies where, as its strategy tells it."""
        return self._worker.placement

    def set_lr(self, lr: float) -> None:
        """Give the first group this learning rate, and the others in proportion; a schedule is scaled along."""
        self._learning_rates.set_lr(lr)

    def set_shares(self, shares: Sequence[float]) -> None:
        """Have each rank take such a share of every batch from now on."""
        self._batch_source.set_shares(shares)

    def inject_delay(self, factor: float) -> None:
        """Have this rank's computing take so many times as long, by sleeping."""
        self.context.phases.delay_factor = factor

    def advance(
        self, num_steps: int, *, explain: bool = False, should_end_early: Callable[[], bool] = lambda: False
    ) -> None:
        """Take up to `steps` steps. Ends early, at the same step on all ranks, when steps have become slow, or when
        `end_early` says on some rank that somebody waits for the end. Ranks ask each other a step before they decide;
        at the beginning they wait for the answer, so that of what was sent ahead nothing is begun.

        What was done is read by :meth:`collect_results`, also after an exception.
        """
        self._completed_steps.clear()
        self.context.phases.reset()
        self.context.phases.clock.start_dispatch()
        self._end_reason, self._nonfinite_loss, self._nonfinite, self.step_report = "failed", None, (), None
        votes, begun = _choose_vote_steps(num_steps), time.perf_counter()
        with self._rng, self._step_guard.guard_sigint():
            answer = _return_false if explain or not num_steps else self._start_vote(should_end_early())
            for k in range(num_steps):
                if answer():
                    self._end_reason = "time"
                    return
                answer = (
                    self._start_vote(time.perf_counter() - begun > MAX_DISPATCH_S or should_end_early())
                    if k + 1 in votes
                    else _return_false
                )
                done = self._attempt_step(explain=explain)
                if done is None:
                    answer()
                    return
                self._completed_steps.append(done)
                self.step += 1
                self._step_guard.commit_step()
        self._end_reason = "done"

    def collect_results(self, *, fingerprint: bool = False) -> DispatchResult:
        """The rows of the steps that the last `advance` completed; and, if asked for, the parameters' checksum."""
        rows, waits = self._build_rows(self._completed_steps)
        timeline = self._build_spans(self._completed_steps[-NUM_TIMELINE_STEPS:])
        sent = build_messages([(one.step, one.events) for one in self._completed_steps], self.context.phases.clock)
        self._completed_steps.clear()
        self._recent_step_s = (self._recent_step_s + rows["step_s"].tolist())[-50:]
        begun = time.perf_counter()
        found = self._worker.compute_fingerprint() if fingerprint else None
        took = time.perf_counter() - begun
        return DispatchResult(
            rows,
            self.step,
            self.lr,
            self._end_reason,
            self._nonfinite_loss,
            self._nonfinite,
            blocked_spans=waits,
            messages=sent if len(sent) else None,
            fingerprint=found,
            fingerprint_s=took,
            step_report=self.step_report,
            spans=timeline,
        )

    def _build_spans(self, completed: Sequence[_CompletedStep]) -> np.ndarray:
        rank = 0 if self.context.group is None else self.context.group.rank
        return build_spans([(one.step, one.events) for one in completed], rank, self.context.phases.clock)

    def _attempt_step(self, *, explain: bool) -> _CompletedStep | None:
        """One step, which is taken or not, whatever goes wrong."""
        self._step_guard.begin_step()
        try:
            return self._run_step(explain=explain)
        except BaseException:
            self._step_guard.is_ending = True
            self._settle_failed_step()
            raise

    def _settle_failed_step(self) -> None:
        """A step failed. It counts if the update was made; until the update began, nothing of it stays."""
        if self._step_guard.update_done:
            self._completed_steps.append(
                self._complete_step(
                    self._worker.step_result or StepResult(None, 0.0, is_finite=True, grad_norm=math.nan)
                )
            )
            self._learning_rates.step_without_loss(self.step + 1, self._batch_source.steps_per_epoch)
            self.step += 1
        elif self._step_guard.partially_updated:
            self.partially_updated = True
        else:
            self._step_guard.roll_back()

    def _run_step(self, *, explain: bool) -> _CompletedStep | None:
        """One step: batches, then the strategy's work on them. None where it was not taken."""
        self._worker.step_result = None
        sent, lr = self._count_sent_bytes(), self.lr
        self.context.phases.enter("data")
        counts = self._batch_source.count_samples(self.step)
        if not any(counts):  # of a stream without length, which has ended: on all ranks at this step
            self._end_reason = "exhausted"
            return None
        samples = sum(counts[s] for s in self.context.shards)
        self._step_start = samples, lr, sent
        batches = self._load_batches()
        microscope = self._make_probe(samples) if explain else None
        try:
            outcome = self._worker.step_result = self._worker.step(batches, counts, microscope)
        except ValueError as error:
            checks.add_batch_norm_hint(error)
            raise
        if self.max_gradients is not None:
            self._update_max_gradients(self.max_gradients)
        if not outcome.is_finite:
            self._end_reason = "nonfinite"
            # Without weight the mean is 0 / 0, which says nothing of this rank's samples.
            self._nonfinite_loss = (
                float(outcome.loss) if outcome.loss is not None and float(outcome.loss_weight) else None
            )
            self._nonfinite = outcome.nonfinite
            return None
        self._learning_rates.step_after_update(
            outcome, self.step + 1, self._batch_source.steps_per_epoch, self.context.group
        )
        if microscope is not None:
            self.step_report = microscope.build_report()
        return self._complete_step(outcome)

    def _complete_step(self, step_result: StepResult) -> _CompletedStep:
        """What there is to tell of the step that ends now."""
        samples, lr, sent = self._step_start
        return _CompletedStep(
            self.step, samples, lr, step_result, self.context.phases.end_step(), self._count_sent_bytes() - sent
        )

    def _load_batches(self) -> list[tuple[int, Any]]:
        if self._worker.batch_per_shard:
            found = self._batch_source.load_batches_by_shard(self.step)
        else:
            found = self._batch_source.load_batches(self.step, self._num_micro_batches)
        return [(count, to_device(batch, self.context.device)) for count, batch in found]

    def _make_probe(self, num_samples: int) -> StepProbe:
        rank = 0 if self.context.group is None else self.context.group.rank
        found = self._worker.make_step_probe(rank=rank, step=self.step, epoch=self._batch_source.get_epoch(self.step))
        found.record_rows(self._batch_source.get_rows(self.step), num_samples)
        return found

    def _count_sent_bytes(self) -> int:
        return 0 if self.context.group is None else self.context.group.count_sent_bytes()

    def _start_vote(self, flag: bool) -> Callable[[], bool]:  # noqa: FBT001 - the one value that is agreed upon
        """Whether any rank says so, to be read after the next step: to wait for it before cost 2 ms."""
        group = self.context.group
        return (lambda: flag) if group is None else group.start_all_reduce_any(flag)

    def _build_rows(self, completed: list[_CompletedStep]) -> tuple[np.ndarray, np.ndarray]:
        """A row a step, and when each was blocked; what of `comm_s` was waiting, only all ranks together can tell."""
        clock, memory = self.context.phases.clock, node_info.read_used_memory(self.context.device)
        clock.synchronize()
        rank = 0 if self.context.group is None else self.context.group.rank
        rows = np.zeros(len(completed), ROW_DTYPE)
        for row, one in zip(rows, completed, strict=True):
            spent, outcome = compute_durations(one.events, clock), one.step_result
            row["step"], row["epoch"], row["rank"] = one.step, self._batch_source.get_epoch(one.step), rank
            row["samples"], row["weight"], row["lr"] = one.samples, float(outcome.loss_weight), one.lr
            row["loss"] = np.nan if outcome.loss is None else float(outcome.loss)
            for phase in ("data", "forward", "update", "step"):
                row[f"{phase}_s"] = spent.get(phase, 0.0)
            row["backward_s"] = sum(s for phase, s in spent.items() if phase.startswith("backward"))
            row["comm_s"] = sum(spent.get(phase, 0.0) for phase in ("sync", *MESSAGE_PHASES))
            row["memory_bytes"], row["sent_bytes"], row["grad_norm"] = memory, one.sent_bytes, outcome.grad_norm
        return rows, build_blocked_times([one.events for one in completed], clock)

    def measure_memory(self, tracker: PeakMemoryTracker, snapshot_bytes: int) -> MemoryUsage:
        """What this rank's part of the job takes of its memory, with so many bytes of snapshots."""
        return tracker.measure_usage(self._worker.model, self._worker.optimizer, snapshot_bytes)

    def visit_state(self, visitor: StateVisitor) -> None:
        """Show all that the next step depends on, besides the data, which follow from the step. A collective."""
        self.step = visitor.visit_value("step", self.step)
        self._worker.visit_state(visitor)
        self._learning_rates.visit_state(visitor)
        self._rng.visit_state(visitor, self.step)
        self._batch_source.visit_state(visitor, self.step)

    def median_step_s(self) -> float:
        """Of the last steps; 0 before the first."""
        return statistics.median(self._recent_step_s) if self._recent_step_s else 0.0

    # -- between dispatches -----------------------------------------------------------------------------------

    def set_process_group(self, group: Group) -> None:
        """Go on in a new generation of the process group."""
        if self.context.group is not None:
            self.context = dataclasses.replace(self.context, group=group)
            self._worker.set_process_group(group)
            self._batch_source.set_process_group(group)

    def close(self) -> None:
        """End what loads batches: a thread, worker processes."""
        self._batch_source.close()

    def state_dict_parts(self) -> dict[str, Any]:
        """What this rank gives to the whole model's state dict. A collective."""
        return self._worker.state_dict_parts()

    def evaluate(
        self,
        batches: Iterable[tuple[int, Any]],
        metrics: dict[str, Callable[..., Any]],
        max_batches: int = 0,
        *,
        after_epoch: bool = False,
    ) -> tuple[int, dict[str, tuple[float, float]]]:
        """(samples, {name: (weighted sum, weight)}) of this rank's part of held-out data. A collective.

        `batches` are pairs of how many samples and the batch itself, which may be of any form; `rounds` is how many
        there are on the rank that has most.
        """
        if metrics and self.loss_fn.training_step is not None:
            raise ValueError(
                "metrics need output and target, which step= keeps to itself; compute them from run.model, or train "
                "with loss="
            )
        sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in ("loss", *metrics)}
        samples = 0
        with self._worker.eval_mode() as forward, self._rng.preserve_states():
            for count, batch in self._pad_batches(batches, max_batches):
                forecast = forward(to_device(batch, self.context.device))
                if forecast is None or not count:
                    continue
                samples += count
                for name, (value, weight) in _compute_metrics(forecast, metrics).items():
                    sums[name][0] += value if weight is not None else value * count
                    sums[name][1] += weight if weight is not None else count
        if after_epoch and self.step % self._batch_source.steps_per_epoch == 0:
            self._learning_rates.step_after_evaluation(self.step, sums["loss"][0], sums["loss"][1], self.context.group)
        return samples, {name: (total, weight) for name, (total, weight) in sums.items()}

    def _pad_batches(self, batches: Iterable[tuple[int, Any]], max_batches: int) -> Iterator[tuple[int, Any]]:
        """The batches; and where ranks must call their models equally often, some that count for nothing."""
        made = 0
        for made, pair in enumerate(batches, 1):  # noqa: B007 - how many there were
            yield pair
        if self._worker.forward_is_collective and self.context.make_sample_batch is not None:
            yield from ((0, self.context.make_sample_batch(1)) for _ in range(max_batches - made))

    # -- for verify -------------------------------------------------------------------------------------------

    def track_max_gradients(self) -> None:
        """Keep the largest gradient of every number from now on, so that `verify` can tell true zeros from rounding."""
        self.max_gradients = {}

    def _update_max_gradients(self, max_gradients: dict[str, torch.Tensor]) -> None:
        for name, p in self._worker.model.named_parameters():
            if p.grad is not None:
                size = p.grad.abs().cpu()
                max_gradients[name] = torch.maximum(max_gradients[name], size) if name in max_gradients else size


def _compute_metrics(
    eval_output: EvalOutput, metrics: dict[str, Callable[..., Any]]
) -> dict[str, tuple[float, float | None]]:
    """{name: (value, weight)}, with the loss among them."""
    weight = eval_output.loss_weight
    found: dict[str, tuple[float, float | None]] = {
        "loss": (float(eval_output.loss), None if weight is None else float(weight))
    }
    for name, metric in metrics.items():
        value = metric(eval_output.output, eval_output.target)
        total, weight = value if isinstance(value, tuple) else (value, None)
        if isinstance(total, torch.Tensor) and total.numel() != 1:
            raise TypeError(
                f"metric {name!r} returned a tensor of shape {tuple(total.shape)}; it must return one number, the "
                "mean over the samples (or a pair (sum, weight))"
            )
        found[name] = (float(total), None if weight is None else float(weight))
    return found


def _return_false() -> bool:
    return False


def _choose_vote_steps(num_steps: int) -> set[int]:
    """After how many steps of a dispatch all ranks decide whether to go on: after each eighth, and once early."""
    return {k for k in (num_steps // 64, *(eighth * num_steps // 8 for eighth in range(1, 8))) if k}


class _JobRng:
    """A job's own random state, so that jobs and cells do not disturb each other's numbers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda_device = device if device.type == "cuda" else None
        self._seed = seed
        self._cpu_state: torch.Tensor
        self._cuda_state: torch.Tensor | None
        self._reseed(seed)

    def _reseed(self, seed: int) -> None:
        with self._fork_rng():
            torch.manual_seed(seed)
            self._save_states()

    def visit_state(self, visitor: StateVisitor, step: int) -> None:
        """Show the states of this job, and those of numpy and of Python in this process."""
        place = visitor.replica
        cuda = None if self._cuda_state is None else rng.encode_state(self._cuda_state)
        now = {"place": place, "cpu": rng.encode_state(self._cpu_state), "cuda": cuda, **rng.get_global_states()}
        found = visitor.per_rank("random", now, lambda states: rng.find_replica_state(states, place))
        if found is None:
            self._reseed(rng.derive_seed(self._seed, step, place))
            return
        self._cpu_state = rng.decode_state(found["cpu"])
        if self._cuda_device is not None and found["cuda"] is not None:
            self._cuda_state = rng.decode_state(found["cuda"])
        rng.set_global_states(found)

    def _fork_rng(self) -> contextlib.AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[self._cuda_device] if self._cuda_device else [])

    def _save_states(self) -> None:
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(self._cuda_device) if self._cuda_device else None

    @contextlib.contextmanager
    def preserve_states(self) -> Iterator[None]:
        """As within, and then as before: however often that is done, training draws the same numbers."""
        before = self._cpu_state, self._cuda_state
        try:
            with self:
                yield
        finally:
            self._cpu_state, self._cuda_state = before

    def __enter__(self) -> None:
        self._fork_context = self._fork_rng()
        self._fork_context.__enter__()
        torch.set_rng_state(self._cpu_state)
        if self._cuda_device and self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda_device)

    def __exit__(self, *exception: object) -> None:
        self._save_states()
        self._fork_context.__exit__(None, None, None)

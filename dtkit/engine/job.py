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
from dtkit.engine.lr_schedule import Rates
from dtkit.engine.observe.phase_timer import Marks, blocked, durations, messages, spans
from dtkit.engine.step_guard import Attempt
from dtkit.history.history import ROW_DTYPE
from dtkit.history.message_times import MESSAGE_PHASES
from dtkit.strategies.base import StepResult
from dtkit.types import Advance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Stream
    from dtkit.engine.data.iterable import IterableStream
    from dtkit.engine.memory import Gauge
    from dtkit.engine.observe.step_probe import Microscope
    from dtkit.engine.state.capture import Archive
    from dtkit.planning.memory_report import MemoryUsage
    from dtkit.strategies.base import EvalOutput, TrainingProgram, Worker, WorkerContext
    from dtkit.types import Astray

SHOWN_STEPS = 2  # of a dispatch, of which the timeline shows everything
SLOW_S = 2.0  # a dispatch that has lasted so long ends at the next agreed step


@dataclasses.dataclass(frozen=True)
class _Done:
    """A step that was taken."""

    step: int
    samples: int
    lr: float
    outcome: StepResult
    marks: Marks
    sent_bytes: int


class Job:
    """One model in training: this rank's part."""

    def __init__(
        self,
        model: torch.nn.Module,
        program: TrainingProgram,
        stream: Stream | IterableStream,
        setting: WorkerContext,
        seed: int,
    ) -> None:
        """`model` has the same parameters on every rank; `seed` starts this rank's random numbers (dropout)."""
        self.step = 0
        self.objective, self.setting = program.loss_fn, setting
        self.layout = {"strategy": type(program.strategy).__name__, "mesh": dict(setting.mesh.axes)}
        """On another one, state that is a rank's own belongs to nobody."""
        self._stream = stream
        self._micro_batches = program.strategy.num_micro_batches
        self._random = _Random(seed, setting.device)
        with self._random:
            self._worker: Worker = program.strategy.setup(model.train(), self.objective, program.optimizer, setting)
            self._rates = Rates(program, self._worker.optimizer)
        self._attempt = Attempt(self._worker.model, self._worker.optimizer, setting.device)
        self.torn = False
        """Whether an update began and did not end: this rank's parameters are of no step."""
        self.largest_gradient: dict[str, torch.Tensor] | None = None
        self.report: Any = None
        """Of the last step, if it was explained."""
        self._recent: list[float] = []
        self._done: list[_Done] = []
        self._ended = "done"
        self._loss: float | None = None
        self._astray: Astray = ()
        self._begun = (0, 0.0, 0)  # of the step that is being taken: samples, learning rate, bytes sent before it

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
        self._rates.set(lr)

    def set_shares(self, shares: Sequence[float]) -> None:
        """Have each rank take such a share of every batch from now on."""
        self._stream.set_shares(shares)

    def slow(self, factor: float) -> None:
        """Have this rank's computing take so many times as long, by sleeping."""
        self.setting.phases.slowness = factor

    def advance(self, steps: int, *, explain: bool = False, hurry: Callable[[], bool] = lambda: False) -> None:
        """Take up to `steps` steps. Ends early, at the same step on all ranks, when steps have become slow, or when
        `hurry` says on some rank that somebody waits for the end. Ranks ask each other a step before they decide; at
        the beginning they wait for the answer, so that of what was sent ahead nothing is begun.

        What was done is read by :meth:`harvest`, also after an exception.
        """
        self._done.clear()
        self.setting.phases.abandon()
        self.setting.phases.clock.start()
        self._ended, self._loss, self._astray, self.report = "failed", None, (), None
        votes, begun = _votes(steps), time.perf_counter()
        with self._random, self._attempt.guarded():
            answer = _no if explain or not steps else self._ask(hurry())
            for k in range(steps):
                if answer():
                    self._ended = "time"
                    return
                answer = self._ask(time.perf_counter() - begun > SLOW_S or hurry()) if k + 1 in votes else _no
                done = self._try(explain=explain)
                if done is None:
                    answer()
                    return
                self._done.append(done)
                self.step += 1
                self._attempt.end()
        self._ended = "done"

    def harvest(self, *, fingerprint: bool = False) -> Advance:
        """The rows of the steps that the last `advance` completed; and, if asked for, the parameters' checksum."""
        rows, waits = self._rows(self._done)
        timeline = self._spans(self._done[-SHOWN_STEPS:])
        sent = messages([(one.step, one.marks) for one in self._done], self.setting.phases.clock)
        self._done.clear()
        self._recent = (self._recent + rows["step_s"].tolist())[-50:]
        begun = time.perf_counter()
        found = self._worker.compute_fingerprint() if fingerprint else None
        took = time.perf_counter() - begun
        return Advance(
            rows,
            self.step,
            self.lr,
            self._ended,
            self._loss,
            self._astray,
            blocked=waits,
            messages=sent if len(sent) else None,
            fingerprint=found,
            fingerprint_s=took,
            report=self.report,
            spans=timeline,
        )

    def _spans(self, done: Sequence[_Done]) -> np.ndarray:
        rank = 0 if self.setting.group is None else self.setting.group.rank
        return spans([(one.step, one.marks) for one in done], rank, self.setting.phases.clock)

    def _try(self, *, explain: bool) -> _Done | None:
        """One step, which is taken or not, whatever goes wrong."""
        self._attempt.begin()
        try:
            return self._one(explain=explain)
        except BaseException:
            self._attempt.over = True
            self._give_up()
            raise

    def _give_up(self) -> None:
        """A step failed. It counts if the update was made; until the update began, nothing of it stays."""
        if self._attempt.updated:
            self._done.append(
                self._taken(self._worker.step_result or StepResult(None, 0.0, is_finite=True, grad_norm=math.nan))
            )
            self._rates.keep_up(self.step + 1, self._stream.steps_per_epoch)
            self.step += 1
        elif self._attempt.torn:
            self.torn = True
        else:
            self._attempt.undo()

    def _one(self, *, explain: bool) -> _Done | None:
        """One step: batches, then the strategy's work on them. None where it was not taken."""
        self._worker.step_result = None
        sent, lr = self._sent_bytes(), self.lr
        self.setting.phases.enter("data")
        counts = self._stream.counts(self.step)
        if not any(counts):  # of a stream without length, which has ended: on all ranks at this step
            self._ended = "exhausted"
            return None
        samples = sum(counts[s] for s in self.setting.shards)
        self._begun = samples, lr, sent
        batches = self._batches()
        microscope = self._microscope(samples) if explain else None
        try:
            outcome = self._worker.step_result = self._worker.step(batches, counts, microscope)
        except ValueError as error:
            checks.explain(error)
            raise
        if self.largest_gradient is not None:
            self._note_gradients(self.largest_gradient)
        if not outcome.is_finite:
            self._ended = "nonfinite"
            # Without weight the mean is 0 / 0, which says nothing of this rank's samples.
            self._loss = float(outcome.loss) if outcome.loss is not None and float(outcome.loss_weight) else None
            self._astray = outcome.nonfinite
            return None
        self._rates.after(outcome, self.step + 1, self._stream.steps_per_epoch, self.setting.group)
        if microscope is not None:
            self.report = microscope.report()
        return self._taken(outcome)

    def _taken(self, outcome: StepResult) -> _Done:
        """What there is to tell of the step that ends now."""
        samples, lr, sent = self._begun
        return _Done(self.step, samples, lr, outcome, self.setting.phases.finish(), self._sent_bytes() - sent)

    def _batches(self) -> list[tuple[int, Any]]:
        if self._worker.batch_per_shard:
            found = self._stream.batches_by_shard(self.step)
        else:
            found = self._stream.batches(self.step, self._micro_batches)
        return [(count, to_device(batch, self.setting.device)) for count, batch in found]

    def _microscope(self, samples: int) -> Microscope:
        rank = 0 if self.setting.group is None else self.setting.group.rank
        found = self._worker.make_step_probe(rank=rank, step=self.step, epoch=self._stream.epoch(self.step))
        found.rows(self._stream.rows(self.step), samples)
        return found

    def _sent_bytes(self) -> int:
        return 0 if self.setting.group is None else self.setting.group.sent_bytes()

    def _ask(self, flag: bool) -> Callable[[], bool]:  # noqa: FBT001 - the one value that is agreed upon
        """Whether any rank says so, to be read after the next step: to wait for it before cost 2 ms."""
        group = self.setting.group
        return (lambda: flag) if group is None else group.ask(flag)

    def _rows(self, done: list[_Done]) -> tuple[np.ndarray, np.ndarray]:
        """A row a step, and when each was blocked; what of `comm_s` was waiting, only all ranks together can tell."""
        clock, memory = self.setting.phases.clock, node_info.memory_used(self.setting.device)
        clock.settle()
        rank = 0 if self.setting.group is None else self.setting.group.rank
        rows = np.zeros(len(done), ROW_DTYPE)
        for row, one in zip(rows, done, strict=True):
            spent, outcome = durations(one.marks, clock), one.outcome
            row["step"], row["epoch"], row["rank"] = one.step, self._stream.epoch(one.step), rank
            row["samples"], row["weight"], row["lr"] = one.samples, float(outcome.loss_weight), one.lr
            row["loss"] = np.nan if outcome.loss is None else float(outcome.loss)
            for phase in ("data", "forward", "update", "step"):
                row[f"{phase}_s"] = spent.get(phase, 0.0)
            row["backward_s"] = sum(s for phase, s in spent.items() if phase.startswith("backward"))
            row["comm_s"] = sum(spent.get(phase, 0.0) for phase in ("sync", *MESSAGE_PHASES))
            row["memory_bytes"], row["sent_bytes"], row["grad_norm"] = memory, one.sent_bytes, outcome.grad_norm
        return rows, blocked([one.marks for one in done], clock)

    def weigh(self, gauge: Gauge, snapshots: int) -> MemoryUsage:
        """What this rank's part of the job takes of its memory, with so many bytes of snapshots."""
        return gauge.read(self._worker.model, self._worker.optimizer, snapshots)

    def exchange(self, archive: Archive) -> None:
        """Show all that the next step depends on, besides the data, which follow from the step. A collective."""
        self.step = archive.value("step", self.step)
        self._worker.visit_state(archive)
        self._rates.exchange(archive)
        self._random.exchange(archive, self.step)
        self._stream.exchange(archive, self.step)

    def median_step_s(self) -> float:
        """Of the last steps; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    # -- between dispatches -----------------------------------------------------------------------------------

    def regroup(self, group: Group) -> None:
        """Go on in a new generation of the process group."""
        if self.setting.group is not None:
            self.setting = dataclasses.replace(self.setting, group=group)
            self._worker.set_process_group(group)
            self._stream.regroup(group)

    def close(self) -> None:
        """End what loads batches: a thread, worker processes."""
        self._stream.close()

    def pieces(self) -> dict[str, Any]:
        """What this rank gives to the whole model's state dict. A collective."""
        return self._worker.state_dict_parts()

    def evaluate(
        self,
        batches: Iterable[tuple[int, Any]],
        metrics: dict[str, Callable[..., Any]],
        rounds: int = 0,
        *,
        after_epoch: bool = False,
    ) -> tuple[int, dict[str, tuple[float, float]]]:
        """(samples, {name: (weighted sum, weight)}) of this rank's part of held-out data. A collective.

        `batches` are pairs of how many samples and the batch itself, which may be of any form; `rounds` is how many
        there are on the rank that has most.
        """
        if metrics and self.objective.training_step is not None:
            raise ValueError(
                "metrics need output and target, which step= keeps to itself; compute them from run.model, or train "
                "with loss="
            )
        sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in ("loss", *metrics)}
        samples = 0
        with self._worker.eval_mode() as forward, self._random.lent():
            for count, batch in self._filled(batches, rounds):
                forecast = forward(to_device(batch, self.setting.device))
                if forecast is None or not count:
                    continue
                samples += count
                for name, (value, weight) in _measure(forecast, metrics).items():
                    sums[name][0] += value if weight is not None else value * count
                    sums[name][1] += weight if weight is not None else count
        if after_epoch and self.step % self._stream.steps_per_epoch == 0:
            self._rates.held_out(self.step, sums["loss"][0], sums["loss"][1], self.setting.group)
        return samples, {name: (total, weight) for name, (total, weight) in sums.items()}

    def _filled(self, batches: Iterable[tuple[int, Any]], rounds: int) -> Iterator[tuple[int, Any]]:
        """The batches; and where ranks must call their models equally often, some that count for nothing."""
        made = 0
        for made, pair in enumerate(batches, 1):  # noqa: B007 - how many there were
            yield pair
        if self._worker.forward_is_collective and self.setting.make_sample_batch is not None:
            yield from ((0, self.setting.make_sample_batch(1)) for _ in range(rounds - made))

    # -- for verify -------------------------------------------------------------------------------------------

    def watch_gradients(self) -> None:
        """Keep the largest gradient of every number from now on, so that `verify` can tell true zeros from rounding."""
        self.largest_gradient = {}

    def _note_gradients(self, largest: dict[str, torch.Tensor]) -> None:
        for name, p in self._worker.model.named_parameters():
            if p.grad is not None:
                size = p.grad.abs().cpu()
                largest[name] = torch.maximum(largest[name], size) if name in largest else size


def _measure(forecast: EvalOutput, metrics: dict[str, Callable[..., Any]]) -> dict[str, tuple[float, float | None]]:
    """{name: (value, weight)}, with the loss among them."""
    weight = forecast.loss_weight
    found: dict[str, tuple[float, float | None]] = {
        "loss": (float(forecast.loss), None if weight is None else float(weight))
    }
    for name, metric in metrics.items():
        value = metric(forecast.output, forecast.target)
        total, weight = value if isinstance(value, tuple) else (value, None)
        if isinstance(total, torch.Tensor) and total.numel() != 1:
            raise TypeError(
                f"metric {name!r} returned a tensor of shape {tuple(total.shape)}; it must return one number, the "
                "mean over the samples (or a pair (sum, weight))"
            )
        found[name] = (float(total), None if weight is None else float(weight))
    return found


def _no() -> bool:
    return False


def _votes(steps: int) -> set[int]:
    """After how many steps of a dispatch all ranks decide whether to go on: after each eighth, and once early."""
    return {k for k in (steps // 64, *(eighth * steps // 8 for eighth in range(1, 8))) if k}


class _Random:
    """A job's own random state, so that jobs and cells do not disturb each other's numbers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._seed = seed
        self._cpu: torch.Tensor
        self._cuda: torch.Tensor | None
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        with self._forked():
            torch.manual_seed(seed)
            self._keep()

    def exchange(self, archive: Archive, step: int) -> None:
        """Show the states of this job, and those of numpy and of Python in this process."""
        place = archive.place
        cuda = None if self._cuda is None else rng.text_of(self._cuda)
        now = {"place": place, "cpu": rng.text_of(self._cpu), "cuda": cuda, **rng.shared()}
        found = archive.own("random", now, lambda states: rng.at_place(states, place))
        if found is None:
            self._begin(rng.fresh_seed(self._seed, step, place))
            return
        self._cpu = rng.state_of(found["cpu"])
        if self._device is not None and found["cuda"] is not None:
            self._cuda = rng.state_of(found["cuda"])
        rng.set_shared(found)

    def _forked(self) -> contextlib.AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[self._device] if self._device else [])

    def _keep(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device else None

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """As within, and then as before: however often that is done, training draws the same numbers."""
        before = self._cpu, self._cuda
        try:
            with self:
                yield
        finally:
            self._cpu, self._cuda = before

    def __enter__(self) -> None:
        self._fork = self._forked()
        self._fork.__enter__()
        torch.set_rng_state(self._cpu)
        if self._device and self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def __exit__(self, *exception: object) -> None:
        self._keep()
        self._fork.__exit__(None, None, None)

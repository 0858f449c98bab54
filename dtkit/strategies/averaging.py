"""Parameter averaging: ranks train alone for some steps, and then take the mean of their parameters.

Also called local SGD (Stich, ICLR 2019) or federated averaging (McMahan et al., AISTATS 2017). The mean is weighted by
the samples of each rank since the last averaging. Ranks send parameters once in `every` steps, while data parallelism
sends gradients in each step.

With an outer optimizer it is DiLoCo (Douillard et al., 2023). The difference between the parameters after the last
averaging and the new mean is then its gradient. Each rank keeps the state of its inner optimizer.

Between two averagings only a rank itself knows whether its gradients are finite. A rank with a gradient that is not
finite makes no updates until the next averaging. Then all ranks are informed, and stop before they average.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.arguments import suggest_options
from dtkit.engine.state.shards import MODEL_PREFIX
from dtkit.planning.cost_model import Cost
from dtkit.strategies import gradients, written_tensors
from dtkit.strategies.base import (
    ALWAYS_SHOWN,
    EvalFunction,
    StepResult,
    Strategy,
    Worker,
    format_options,
    make_optimizer,
    split_state_dict,
)
from dtkit.strategies.module_modes import module_eval_mode
from dtkit.strategies.module_numbers import list_numbers
from dtkit.strategies.options import check_count, check_flag, check_positive, check_rate
from dtkit.strategies.replicated import LossAccumulator, ReplicatedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.messages import Fingerprint
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.loss import Loss


@suggest_options
@dataclasses.dataclass(frozen=True, repr=False)
class OuterSGD:
    """SGD on the change between two averages, as in DiLoCo (Douillard et al., 2023). (1.0, 0.0) is plain averaging."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        check_rate("lr", self.lr, example=0.7)
        check_flag("nesterov", self.nesterov)
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, int | float):
            raise TypeError(f"momentum={self.momentum!r}; it must be a number, such as momentum=0.9")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}; it must be 0 or more and less than 1, such as momentum=0.9")

    __repr__ = format_options

    def build_optimizer(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer for these parameters."""
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=nesterov)


@suggest_options
@dataclasses.dataclass(frozen=True, repr=False)
class ParameterAveraging(Strategy):
    """Local SGD (Stich, ICLR 2019): ranks train alone, and their parameters are averaged after every `every` steps.

    Parameters
    ----------
    every
        Number of steps between averagings. Even with 1, only plain SGD gives the result of one process: moments
        (Adam) are each rank's own, and so is momentum, which differs if ranks have unequal parts of a batch.
    outer
        ``dtkit.OuterSGD(lr, momentum, nesterov)`` for DiLoCo; plain averaging without.
    clip_grad_norm
        Largest norm of each rank's gradient.

    """

    every: int = dataclasses.field(default=8, metadata=ALWAYS_SHOWN)
    outer: OuterSGD | None = None
    clip_grad_norm: float | None = None

    supports_explain = False  # no gradients are all-reduced
    divides_batch = False  # each rank trains on its own loss

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("every", self.every)
        check_positive("clip_grad_norm", self.clip_grad_norm)
        if self.outer is not None and not isinstance(self.outer, OuterSGD):
            raise TypeError(f"outer={self.outer!r}; it must be a dtkit.OuterSGD, or left out for plain averages")

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """Return the cost of an all-reduce of the parameters once in `every` steps.

        Its flat copy of the parameters doesn't fit into memory of freed activations, and so adds to it. An outer
        optimizer keeps the last averaged parameters and its momentum, and temporarily their difference to the mean.
        """
        kept = 0 if self.outer is None else profile.gradients * (1 + (self.outer.momentum > 0))
        num_temporaries = 1 + (self.outer is not None)
        return Cost.for_replica(
            profile,
            optimizer_state=profile.optimizer_state + kept,
            temporaries=max(
                profile.update_temporaries,
                round(profile.activations.predict(profile.rows)) + num_temporaries * profile.gradients,
            ),
            sent_bytes=benchmark.compute_sum_bytes(profile.gradients) / self.every,
            exposed_s=benchmark.estimate_sum_s(profile.gradients) / self.every,
        )

    def setup(
        self, model: torch.nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> Worker:
        """Return a worker with this rank's replica; in a simulation, with one for each shard.

        The parameters must already be equal on all ranks.
        """
        model = model.to(context.device)
        if context.group is None and len(context.shards) > 1:
            return _SimulatedAveragingWorker(self, model, loss_fn, optimizer, context)
        return _AveragingWorker(self, model, loss_fn, make_optimizer(optimizer, model), context)


class _AveragingWorker(ReplicatedWorker):
    """One rank's copy of the model, which trains alone between two averagings."""

    _optimizer_differs_by_rank = True

    def __init__(
        self,
        strategy: ParameterAveraging,
        model: torch.nn.Module,
        loss_fn: Loss,
        optimizer: torch.optim.Optimizer,
        context: WorkerContext,
    ) -> None:
        super().__init__(model, loss_fn, optimizer, context, clip_grad_norm=strategy.clip_grad_norm)
        self._average_every, self._steps_since_average = strategy.every, 0
        self._averaging_weight = 0.0  # this rank's weight in the next mean
        self.num_forwards = 0
        """Number of steps with samples since the last averaging."""
        self._averaged_numbers = list_numbers(model)  # as they were at the last averaging
        self._nonfinite_since_average = False  # whether a gradient was not finite
        self._nonfinite_loss: torch.Tensor | float | None = None  # the loss of that step
        self._fingerprint_requested = False  # from the next averaging
        self._last_fingerprint: Fingerprint | None = None
        self._outer_optimizer = (
            _OuterOptimizer(strategy.outer, self._parameters) if strategy.outer is not None else None
        )

    def step(
        self,
        batches: Sequence[tuple[int, Any]],
        counts: Sequence[int],
        probe: StepProbe | None = None,  # noqa: ARG002 - no gradients are reduced
    ) -> StepResult:
        """Take a step on this rank alone; the last of every `every` steps ends with an averaging."""
        loss_accumulator = self._compute_rank_gradients(batches, sum(counts[s] for s in self._context.shards))
        averaging = (self._steps_since_average + 1) % self._average_every == 0
        norm = self._compute_grad_norm()
        healthy = (math.isfinite(norm) or self._are_gradients_finite()) and not self._nonfinite_since_average
        if averaging and self._group is not None:
            self._phases.enter("sync")
            healthy = not self._group.all_reduce_any(not healthy)
        if averaging and not healthy:
            mean = self._nonfinite_loss if self._nonfinite_since_average else loss_accumulator.mean_loss
            self._nonfinite_since_average = False
            return StepResult(mean, loss_accumulator.loss_weight, is_finite=False, grad_norm=norm)
        if not (healthy or self._nonfinite_since_average):
            self._nonfinite_loss = loss_accumulator.mean_loss
        self._nonfinite_since_average = not healthy
        if healthy and batches:
            self._clip_and_update()
        self._averaging_weight += float(loss_accumulator.loss_weight)
        self.num_forwards += bool(batches)
        self._steps_since_average += 1
        self.step_result = self._make_step_result(loss_accumulator, counts, finite=True, norm=norm)
        if averaging:
            self._average_parameters()
        return self.step_result

    def _compute_rank_gradients(self, batches: Sequence[tuple[int, Any]], samples: int) -> LossAccumulator:
        """Compute the gradients of the mean over this rank's samples."""
        self._zero_grad()
        loss_accumulator = LossAccumulator(samples)
        for count, batch in batches:
            self._phases.enter("forward")
            loss = loss_accumulator.add(*self._compute_loss(self._model, batch), count)
            self._phases.enter("backward")
            self._scale_loss(loss).backward()  # type: ignore[no-untyped-call]
        if isinstance(loss_accumulator.loss_weight, torch.Tensor) and float(loss_accumulator.loss_weight):
            gradients.scale_(self._list_local_gradients(), 1 / loss_accumulator.loss_weight)
        return loss_accumulator

    @torch.no_grad()
    def _average_parameters(self) -> None:
        """Average parameters in one flat all-reduce, and take the outer optimizer's step if there is one."""
        flat = torch.cat(
            [self._parameters[0].new_tensor([self._averaging_weight]), *(p.reshape(-1) for p in self._parameters)]
        )
        mean = flat[1:]
        if self._group is not None:
            self._phases.enter("sync")
            mean.mul_(self._averaging_weight)
            self._group.all_reduce(flat)  # includes the weight, as its first element
            if flat[0]:
                mean.div_(flat[0])
            else:  # without any samples, parameters stay
                mean = self.flat_parameters
            written_tensors.equalize_counters(
                self._model, self.num_forwards, self._averaged_numbers, self._context, self._group
            )
            self._averaged_numbers = list_numbers(self._model)
        self._phases.enter("update")
        self.load_flat_mean(mean)
        if self._fingerprint_requested:
            self._last_fingerprint, self._fingerprint_requested = super().compute_fingerprint(), False

    @torch.no_grad()
    def load_flat_mean(self, flat_parameters: torch.Tensor) -> None:
        """Continue from this mean of all ranks' parameters, concatenated in a flat tensor."""
        parts = torch.split(flat_parameters, [p.numel() for p in self._parameters])
        means = [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]
        if self._outer_optimizer is not None:
            means = self._outer_optimizer.step(means)
        for p, mean in zip(self._parameters, means, strict=True):
            p.copy_(mean)
        self._averaging_weight, self.num_forwards = 0.0, 0

    def visit_state(self, visitor: StateVisitor) -> None:
        """Visit a replica's state, the progress to the next averaging, and the outer optimizer's state."""
        super().visit_state(visitor)
        self._steps_since_average = visitor.visit_value("averaging steps", self._steps_since_average)
        self._averaging_weight = visitor.per_rank(
            "averaging weight", self._averaging_weight, lambda each: sum(each) / visitor.world_size
        )
        if self._outer_optimizer is not None:
            names = [name for name, p in self._model.named_parameters() if p.requires_grad]
            self._outer_optimizer.visit_state(visitor, names, self._parameters)

    def _visit_parameters(self, visitor: StateVisitor) -> None:
        """Visit each rank's parameters. With a different number of ranks, all continue from their mean."""
        visitor.per_replica(MODEL_PREFIX, self.named_parameters(), self._averaging_weight)

    @property
    def averaging_weight(self) -> float:
        """Weight of this rank's parameters in the next mean."""
        return self._averaging_weight

    @property
    def flat_parameters(self) -> torch.Tensor:
        """This rank's parameters, concatenated."""
        return torch.cat([p.detach().reshape(-1) for p in self._parameters])

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[torch.nn.Module]:
        """Set the model to the current mean of all ranks' models, within the context."""
        with super().averaged_model() as model, self._averaged_tensors(self._parameters, self._averaging_weight):
            yield model

    def compute_fingerprint(self) -> Fingerprint | None:
        """Return a checksum from the last averaging, since only then parameters are equal; None until the next."""
        if self._steps_since_average % self._average_every == 0:
            return super().compute_fingerprint()
        fingerprint, self._last_fingerprint, self._fingerprint_requested = self._last_fingerprint, None, True
        return fingerprint


class _OuterOptimizer:
    """The outer optimizer with its parameters: those after the last averaging."""

    def __init__(self, config: OuterSGD, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        self._optimizer = config.build_optimizer(self._parameters)

    @torch.no_grad()
    def visit_state(self, visitor: StateVisitor, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        """Visit its state; if none was saved, start at these parameters."""
        named = dict(zip(names, self._parameters, strict=True))
        if visitor.visit_tensors("outer", named):
            visitor.visit_optimizer("outer optimizer", self._optimizer, named)
        else:
            for outer_p, p in zip(self._parameters, parameters, strict=True):
                outer_p.copy_(p)

    def step(self, mean_parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Take a step with the old parameters minus the mean as gradient, and return the new parameters."""
        for p, mean in zip(self._parameters, mean_parameters, strict=True):
            p.grad = p.detach() - mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [p.detach() for p in self._parameters]


class _SimulatedAveragingWorker(Worker):
    """All ranks in one process, with a model each: the reference of `verify`."""

    batch_per_shard = True

    def __init__(
        self,
        strategy: ParameterAveraging,
        model: torch.nn.Module,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> None:
        self.model = self._model = model
        self._average_every, self._steps_since_average, self._loss_fn = strategy.every, 0, loss_fn
        self._rank_workers = []
        for shard in context.shards:
            rank_model = copy.deepcopy(model)
            rank_context = dataclasses.replace(context, shards=[shard])
            never = dataclasses.replace(strategy, every=2**62)  # this class averages instead of the rank's worker
            rank_optimizer = make_optimizer(optimizer, rank_model)
            self._rank_workers.append(_AveragingWorker(never, rank_model, loss_fn, rank_optimizer, rank_context))
        self.optimizer = self._rank_workers[0].optimizer

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the model as a whole, which has their mean after an averaging."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    def step(
        self,
        batches: Sequence[tuple[int, Any]],
        counts: Sequence[int],
        probe: StepProbe | None = None,  # noqa: ARG002 - no gradients are reduced
    ) -> StepResult:
        """Take a step of each rank, on one batch for each shard (None without samples)."""
        results: list[StepResult] = []
        for rank, (count, batch) in zip(self._rank_workers, batches, strict=True):
            for group, first in zip(rank.optimizer.param_groups, self.optimizer.param_groups, strict=True):
                group.update({name: value for name, value in first.items() if name != "params"})  # a scheduler's values
            results.append(rank.step([(count, batch)] if count else [], counts))
        self._steps_since_average += 1
        if self._steps_since_average % self._average_every == 0:
            mean = self._compute_mean_parameters()
            most = max(self._rank_workers, key=lambda rank: rank.num_forwards)
            for rank in self._rank_workers:
                written_tensors.copy_counters(most.model, rank.model)
            for rank in self._rank_workers:
                rank.load_flat_mean(mean)
        weight = sum(float(o.loss_weight) for o in results)
        losses = [o.loss * (float(o.loss_weight) / weight) for o in results if o.loss is not None]
        loss = sum(losses) if losses else None
        return StepResult(loss, weight, all(o.is_finite for o in results), float("nan"))

    def _compute_mean_parameters(self) -> torch.Tensor:
        total = sum(rank.averaging_weight for rank in self._rank_workers)
        return torch.stack([rank.flat_parameters * (rank.averaging_weight / total) for rank in self._rank_workers]).sum(
            0
        )

    def set_process_group(self, group: Group) -> None:
        """Do nothing: a simulation has no process group."""

    def visit_model(self, visitor: StateVisitor) -> None:
        """Visit the mean of the models."""
        self._load_mean()
        buffers, extra = split_state_dict(self._model)
        visitor.visit_tensors(MODEL_PREFIX, {**dict(self._model.named_parameters(remove_duplicate=False)), **buffers})
        visitor.visit_extra_state(self._model, extra)

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """Evaluate the mean of the models."""
        self._load_mean()
        with module_eval_mode(self._model):
            yield lambda batch: self._loss_fn.evaluate_batch(self._model, batch)

    @torch.no_grad()
    def _load_mean(self) -> None:
        mean = (
            self._compute_mean_parameters()
            if any(r.averaging_weight for r in self._rank_workers)
            else self._rank_workers[0].flat_parameters
        )
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        for p, part in zip(trainable, torch.split(mean, [p.numel() for p in trainable]), strict=True):
            p.copy_(part.view_as(p))

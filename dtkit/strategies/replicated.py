"""A rank's whole copy of the model, and what every strategy with such copies does alike.

Exactness. With n_i of the B samples of a step on rank i, the gradient of the mean over all B samples is the *sum* over
ranks of  (n_i / B) grad_i : each rank scales its mean loss before backward, and gradients are added up. A loss that
returns (sum, weight) is differentiated as it is; the weights are added up over ranks meanwhile, and gradients divided
by their total. Both are linear, so a rank's samples may as well come in micro-batches.
"""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

from dtkit.strategies import gradients
from dtkit.strategies.base import EvalFunction, StepResult, Worker, WorkerContext, split_state_dict
from dtkit.strategies.loss import LOSS_IS_MEAN, LOSS_IS_WEIGHTED_SUM, Loss
from dtkit.engine.state.checksum import compute_checksum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.types import Fingerprint

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LossAccumulator:
    """Loss and weight of one rank's micro-batches in one step."""

    def __init__(self, samples: int) -> None:
        self._global_samples = samples
        self._loss_sum: torch.Tensor | None = None
        self.loss_weight: torch.Tensor | float = 0.0
        """What the loss counts for in the global mean; of no samples, 0."""
        self.loss_form: int | None = None
        """MEAN or PAIR; None without a sample."""

    def add(self, loss: torch.Tensor, loss_weight: torch.Tensor | None, count: int) -> torch.Tensor:
        """Take in a micro-batch's loss; returns what to differentiate: its part of the global mean, or of the sum."""
        self.loss_form = LOSS_IS_MEAN if loss_weight is None else LOSS_IS_WEIGHTED_SUM
        part = loss.detach() if loss_weight is not None else loss.detach() * count
        self._loss_sum = part if self._loss_sum is None else self._loss_sum + part
        self.loss_weight = self.loss_weight + (float(count) if loss_weight is None else loss_weight.detach())
        return loss if loss_weight is not None else loss * (count / self._global_samples)

    @property
    def mean_loss(self) -> torch.Tensor | None:
        """The mean loss of this rank's samples."""
        return None if self._loss_sum is None else self._loss_sum / self.loss_weight


class ReplicatedWorker(Worker):
    """One rank's copy of the model, with its optimiser. Subclasses say what is synchronised, and when."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Loss,
        optimizer: torch.optim.Optimizer,
        context: WorkerContext,
        *,
        clip_grad_norm: float | None = None,
        precision: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.model = self._model = model
        self._loss_fn, self._context = loss_fn, context
        self._group, self._phases = context.group, context.phases
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._has_uniform_parameters = len({(p.dtype, p.device) for p in self._parameters}) == 1
        self._clip_grad_norm, self._autocast_dtype = clip_grad_norm, AUTOCAST_DTYPES.get(precision or "")
        self._grad_scaler = None
        if precision == "fp16":  # torch's own first factor, 2**16, lets the first updates of small models overflow
            self._grad_scaler = torch.amp.GradScaler(context.device.type, init_scale=2.0**12)
        if self._grad_scaler is not None:
            self._grad_scaler.scale(
                torch.zeros((), device=context.device)
            )  # it must know its factor, even without samples
        self._loss_form: int | None = (
            None  # MEAN or PAIR: agreed upon in the first step of each generation of the group
        )
        self._num_samples_seen = 0  # samples that this rank's buffers (batch statistics) were made from

    def set_process_group(self, group: Group) -> None:
        """Go on in a new generation of the process group."""
        self._group = group
        self._loss_form = None  # of a step that was broken off, some ranks may know it and others not

    # -- parts of a step --------------------------------------------------------------------------------------

    def _zero_grad(self) -> None:
        for p in self._parameters:  # the optimiser need not hold all of them
            p.grad = None

    def _compute_loss(self, module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._autocast_dtype is None:
            return self._loss_fn(module, batch)
        with torch.autocast(self._context.device.type, dtype=self._autocast_dtype):
            return self._loss_fn(module, batch)

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to differentiate: in fp16 larger by a factor that keeps small gradients from vanishing."""
        return loss if self._grad_scaler is None else self._grad_scaler.scale(loss)

    def _start_weight_reduce(
        self, loss_accumulator: LossAccumulator
    ) -> torch.futures.Future[list[torch.Tensor]] | None:
        """Tell the other ranks this one's weight, where losses are pairs. The future has the total."""
        if self._loss_form is None:
            self._phases.enter("sync")
            self._loss_form = gradients.agree_on_loss_form(loss_accumulator.loss_form, self._group)
        if self._loss_form == LOSS_IS_MEAN:
            return None
        total = torch.as_tensor(loss_accumulator.loss_weight, dtype=torch.float64).to(self._context.device, copy=True)
        if self._group is None:
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result([total])
            return done
        return self._group.start_all_reduce(total)

    def _divide_by_weight(self, total_weight_future: torch.futures.Future[list[torch.Tensor]] | None) -> None:
        """Gradients of a sum, made into those of the weighted mean."""
        if total_weight_future is not None:
            # waits: a collective, limited by the process group's timeout
            gradients.scale_(
                self._list_local_gradients(), gradients.compute_weight_factor(total_weight_future.wait()[0])
            )

    def _list_local_gradients(self) -> list[torch.Tensor]:
        """What lies on this rank of the gradients that there are."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def _sum_gradients(self, local: Sequence[torch.Tensor | None]) -> None:
        """Give each parameter the sum of all ranks' gradients."""
        for p, gradient in zip(
            self._parameters, gradients.all_reduce_flat(self._parameters, local, self._all_reduce_flat), strict=True
        ):
            p.grad = gradient

    def _all_reduce_flat(self, flat: torch.Tensor) -> None:
        if self._group is not None:
            self._phases.enter("sync")
            self._group.all_reduce(flat)

    def _compute_local_gradients(
        self, batches: Sequence[tuple[int, Any]], loss_accumulator: LossAccumulator
    ) -> list[torch.Tensor | None]:
        """This rank's part of the global gradient, past all hooks of the parameters; all None without a sample."""
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for count, batch in batches:
            self._phases.enter("forward")
            loss = loss_accumulator.add(*self._compute_loss(self._model, batch), count)
            self._phases.enter("backward")
            new = torch.autograd.grad(self._scale_loss(loss), self._parameters, allow_unused=True)
            dense = [g.to_dense() if g is not None and g.is_sparse else g for g in new]
            found = [b if a is None else a if b is None else a + b for a, b in zip(found, dense, strict=True)]
        return found

    def _clip_and_update(self) -> tuple[bool, float]:
        """Clip and update, unless a gradient is not finite. (whether all were, their norm before clipping)."""
        self._phases.enter("update")
        if self._grad_scaler is not None:
            self._grad_scaler.unscale_(self.optimizer)
        norm = self._compute_grad_norm()
        # The norm itself may have overflowed although every gradient is finite.
        finite = math.isfinite(norm) or self._are_gradients_finite()
        if finite and (factor := gradients.compute_clip_factor(norm, self._clip_grad_norm)) < 1:
            gradients.scale_(self._list_local_gradients(), factor)
        if self._grad_scaler is not None:
            self._grad_scaler.step(
                self.optimizer
            )  # takes no step where a gradient has overflowed, and lowers the factor
            self._grad_scaler.update()
            finite = finite or self._grad_scaler.get_scale() >= 1
        elif finite:
            self.optimizer.step()
        return finite, norm

    def _compute_grad_norm(self) -> float:
        """Of all gradients together. Asked for in every step, so it must be cheap: fused, and one number read."""
        found = [gradients.get_values(g) for g in self._list_local_gradients()]
        if not found:
            return 0.0
        if self._has_uniform_parameters:
            return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found))))  # noqa: SLF001 - as clip_grad_norm_ does
        return float(torch.nn.utils.get_total_norm(found))

    def _are_gradients_finite(self) -> bool:
        return all(bool(gradients.get_values(g).isfinite().all()) for g in self._list_local_gradients())

    def _make_step_result(
        self, loss_accumulator: LossAccumulator, counts: Sequence[int], *, finite: bool, norm: float
    ) -> StepResult:
        self._num_samples_seen += sum(counts[s] for s in self._context.shards)
        return StepResult(loss_accumulator.mean_loss, loss_accumulator.loss_weight, finite, norm)

    def _explain_step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None
    ) -> StepResult:
        """One step in the open: local gradients, one explicit sum, the update. A rank may be without samples in it."""
        tally = LossAccumulator(sum(counts))
        local = self._compute_local_gradients(batches, tally)
        total = self._start_weight_reduce(tally)
        self._sum_gradients(local)
        self._divide_by_weight(total)
        if probe is not None:
            # waits: a collective, limited by the process group's timeout
            divisor = 1.0 if total is None else float(total.wait()[0])
            self._report_gradients(probe, tally, counts, local, divisor)
        finite, norm = self._clip_and_update()
        if probe is not None and finite:
            probe.record_parameter_updates(float(self.optimizer.param_groups[0]["lr"]))
        return self._make_step_result(tally, counts, finite=finite, norm=norm)

    def _report_gradients(
        self,
        probe: StepProbe,
        loss_accumulator: LossAccumulator,
        counts: Sequence[int],
        local_gradients: Sequence[torch.Tensor | None],
        divisor: float,
    ) -> None:
        """What the step did so far: losses and gradients."""
        weight, scale = (
            float(loss_accumulator.loss_weight),
            1.0 if self._grad_scaler is None else self._grad_scaler.get_scale(),
        )
        probe.record_loss(
            loss_accumulator.mean_loss, weight, weight / (sum(counts) if self._loss_form == LOSS_IS_MEAN else divisor)
        )
        probe.record_local_gradients([None if g is None else g / (divisor * scale) for g in local_gradients])
        probe.record_reduced_gradients([None if p.grad is None else p.grad / scale for p in self._parameters])
        if self._clip_grad_norm is not None:
            probe.record_clipping(
                gradients.compute_clip_factor(self._compute_grad_norm() / scale, self._clip_grad_norm)
            )
        probe.save_parameters()

    # -- all state --------------------------------------------------------------------------------------------

    def visit_state(self, visitor: StateVisitor) -> None:
        """Parameters and optimiser; buffers and the samples that they were made from; the scale of fp16's loss."""
        self._visit_parameters(visitor)
        buffers, extra = split_state_dict(self._model)
        visitor.per_replica("model", buffers, float(self._num_samples_seen))
        visitor.visit_extra_state(self._model, extra)
        self._num_samples_seen = visitor.per_rank(
            "seen", self._num_samples_seen, lambda seen: sum(seen) // visitor.world_size
        )
        if self._grad_scaler is not None:
            visitor.visit_stateful("scaler", self._grad_scaler, "the loss's scale")

    def _visit_parameters(self, visitor: StateVisitor) -> None:
        """What is equal on all ranks that hold it."""
        named = self._named_parameters()
        visitor.visit_tensors("model", named)
        visitor.visit_optimizer("optimizer", self.optimizer, named)

    def _named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that lie here, by all of their names."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    # -- the whole model --------------------------------------------------------------------------------------

    def state_dict_parts(self) -> dict[str, Any]:
        """The whole state dict from rank 0, or from whoever works alone."""
        with self.averaged_model() as model:
            if self._group is not None and self._group.rank != 0:
                return {}
            return {name: copy_to_cpu(value) for name, value in model.state_dict().items()}

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """Of the model that :meth:`whole` gives."""
        with self.averaged_model() as model, module_eval_mode(model):
            yield lambda batch: self._loss_fn.evaluate_batch(model, batch)

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[torch.nn.Module]:
        """This rank's copy, its float buffers (batch statistics) averaged over ranks by samples while it lasts."""
        buffers = [b for b in self._model.buffers() if b.is_floating_point()]
        with self._averaged_tensors(buffers, float(self._num_samples_seen)):
            yield self._model

    @contextlib.contextmanager
    def _averaged_tensors(self, tensors: Sequence[torch.Tensor], weight: float) -> Iterator[None]:
        """Have tensors hold their weighted mean over ranks, and then their own values again."""
        own = [t.detach().clone() for t in tensors] if self._group is not None else []
        try:
            if own and self._group is not None:
                total = self._group.all_reduce(torch.tensor([weight], dtype=torch.float64)).item()
                if total:
                    for tensor in tensors:
                        self._group.all_reduce(tensor.detach().mul_(weight / total))
            yield
        finally:
            for tensor, value in zip(tensors, own, strict=False):
                tensor.detach().copy_(value)

    def compute_fingerprint(self) -> Fingerprint | None:
        """A checksum of all trainable parameters' bits, to be equal on all ranks."""
        return {(): compute_checksum(self._parameters)}


@contextlib.contextmanager
def module_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Have a model make forecasts, and then train on."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def copy_to_cpu(value: Any) -> Any:
    """A copy of an entry of a state dict, on the CPU; a module's extra state may be anything."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)





"""A rank's whole copy of the model: the base of every strategy with such copies.

Results are exact. Rank i has n_i of the B samples of a step. The gradient of the mean loss is the *sum* of (n_i / B)
grad_i over ranks. So each rank scales its loss before backward. A loss that returns (sum, weight) is differentiated as
it is. Ranks add up the weights and divide the gradients by the total. Both ways are linear, so they hold for
micro-batches as well.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.torch_private import foreach_norm, run_backward
from dtkit.engine.observe.step_scalars import weigh_scalars
from dtkit.engine.state.checksum import compute_checksum
from dtkit.engine.state.shards import MODEL_PREFIX
from dtkit.strategies import gradients, written_tensors
from dtkit.strategies.base import EvalFunction, StepResult, Worker, split_state_dict
from dtkit.strategies.loss import LOSS_IS_MEAN, LOSS_IS_WEIGHTED_SUM, Loss
from dtkit.strategies.module_modes import module_eval_mode
from dtkit.strategies.module_numbers import assign_numbers, find_changes, list_numbers
from dtkit.strategies.router_loss import RouterLosses, find_namespaces
from dtkit.strategies.update import run_update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.messages import Fingerprint

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _run_backward_from(loss: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run `loss.backward(gradient)`, for a plain tensor without the checks that load half of torch's compiler."""
    if type(loss) is torch.Tensor:
        keep_graph = create_graph = False
        run_backward((loss,), (gradient,), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)
    else:
        loss.backward(gradient)  # type: ignore[no-untyped-call]


class LossAccumulator:
    """Sum of the losses and weights of one rank's micro-batches in one step."""

    def __init__(self, samples: int) -> None:
        self.global_samples = samples
        self._parts: list[tuple[torch.Tensor | float, int]] = []  # (mean or sum, samples) of each micro-batch
        self.loss_weight: torch.Tensor | float = 0.0
        """Weight of the loss in the global mean; 0 without samples."""
        self.loss_form: int | None = None
        """`LOSS_IS_MEAN` or `LOSS_IS_WEIGHTED_SUM`; None without samples."""

    def add(self, loss: torch.Tensor, loss_weight: torch.Tensor | None, count: int) -> torch.Tensor:
        """Add a micro-batch's loss, and return its part of the global mean (or sum), to differentiate."""
        self.record(loss, loss_weight, count)
        return loss if loss_weight is not None else loss * (count / self.global_samples)

    def record(self, loss: torch.Tensor, loss_weight: torch.Tensor | None, count: int) -> None:
        """Add a micro-batch's loss."""
        weigh_scalars(count)
        self.loss_form = LOSS_IS_MEAN if loss_weight is None else LOSS_IS_WEIGHTED_SUM
        # A number or a copy, since the user's code may write to it. On a CPU, reading it doesn't wait for anything.
        is_readable = loss_weight is None and loss.is_cpu and type(loss) is torch.Tensor
        self._parts.append((loss.item() if is_readable else loss.detach().clone(), count))
        self.loss_weight = self.loss_weight + (float(count) if loss_weight is None else loss_weight.detach())

    @property
    def mean_loss(self) -> torch.Tensor | float | None:
        """Mean loss of this rank's samples."""
        if not self._parts:
            return None
        if self.loss_form == LOSS_IS_WEIGHTED_SUM:
            return functools.reduce(operator.add, [part for part, _ in self._parts]) / self.loss_weight
        if len(self._parts) == 1:
            return self._parts[0][0]
        return functools.reduce(operator.add, [part * count for part, count in self._parts]) / self.loss_weight


class ReplicatedWorker(Worker):
    """One rank's copy of the model, with its optimizer. Subclasses synchronize the copies."""

    _optimizer_differs_by_rank = False
    _num_micro_batches = 1
    """Largest number of forward passes of a rank in one step."""
    _router_losses: RouterLosses | None = None
    """The routers' losses that ranks compute together, if there are some."""

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
        self._frozen_parameters = [p for p in model.parameters() if not p.requires_grad]
        self._has_uniform_parameters = len({(p.dtype, p.device) for p in self._parameters}) == 1
        self._clip_grad_norm, self._autocast_dtype = clip_grad_norm, AUTOCAST_DTYPES.get(precision or "")
        self._grad_scaler = None
        if precision == "fp16":  # torch's default, 2**16, overflows in the first steps of small models
            self._grad_scaler = torch.amp.GradScaler(context.device.type, init_scale=2.0**12)
        if self._grad_scaler is not None:  # initialize its factor, even without samples
            self._grad_scaler.scale(torch.zeros((), device=context.device))
        self._backward_seed: tuple[tuple[float, torch.dtype, torch.device], torch.Tensor] | None = None
        self._loss_form: int | None = None  # ranks agree on it in the first step of each process group
        self._num_samples_seen = 0  # the weight of this rank's batch statistics
        self._initial_numbers = list_numbers(self._stateful_module)

    @property
    def _stateful_module(self) -> torch.nn.Module:
        """The model, with the loss if that is a module."""
        loss = self._loss_fn.loss_fn
        return torch.nn.ModuleList([self._model, loss]) if isinstance(loss, torch.nn.Module) else self._model

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group."""
        self._group = group
        self._loss_form = None  # after a failed step only some ranks may know it

    # -- parts of a step --------------------------------------------------------------------------------------

    def _zero_grad(self) -> None:
        for p in self._parameters:  # the optimizer may not hold all of them
            p.grad = None

    def _share_router_losses(self, process_group: ProcessGroup | None = None) -> None:
        """Let the ranks compute routers' losses together: all, or those of a `process_group`."""
        self._router_losses = None
        if self._group is not None and self._group.world_size > 1 and self._num_micro_batches == 1:
            namespaces = find_namespaces(self._model, self._loss_fn.training_step)
            if namespaces:
                self._router_losses = RouterLosses(namespaces, self._context, self._group, process_group)

    def _answer_router_losses(self, counts: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Return a context for user code in which ranks without samples take part in the routers' losses."""
        return (
            contextlib.nullcontext() if self._router_losses is None else self._router_losses.answer_empty_ranks(counts)
        )

    def _compute_loss(self, module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._autocast_dtype is None and self._router_losses is None:
            return self._loss_fn(module, batch)
        with contextlib.ExitStack() as stack:
            if self._autocast_dtype is not None:
                stack.enter_context(torch.autocast(self._context.device.type, dtype=self._autocast_dtype))
            if self._router_losses is not None:
                stack.enter_context(self._router_losses.add_up())
            return self._loss_fn(module, batch)

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times fp16's factor, which keeps small gradients from vanishing."""
        return loss if self._grad_scaler is None else self._grad_scaler.scale(loss)

    def _run_backward(self, loss: torch.Tensor, factor: float) -> None:
        """Add the gradients of the loss times a factor, which is backward's first gradient and so costs nothing."""
        scaled = self._scale_loss(loss)
        if self._backward_seed is None or self._backward_seed[0] != (factor, scaled.dtype, scaled.device):
            self._backward_seed = (factor, scaled.dtype, scaled.device), torch.full_like(scaled.detach(), factor)
        _run_backward_from(scaled, self._backward_seed[1])

    def _start_weight_reduce(self, loss_accumulator: LossAccumulator) -> Callable[[], torch.Tensor] | None:
        """Start to sum the weights of all ranks, if losses are pairs. Return a function that waits for the total."""
        if self._loss_form is None:
            self._phases.enter("sync")
            self._loss_form = gradients.agree_on_loss_form(loss_accumulator.loss_form, self._group)
        if self._loss_form == LOSS_IS_MEAN:
            return None
        total = torch.as_tensor(loss_accumulator.loss_weight, dtype=torch.float64).to(self._context.device, copy=True)
        return (lambda: total) if self._group is None else self._group.start_all_reduce_small(total)

    def _divide_by_weight(self, wait_for_total: Callable[[], torch.Tensor] | None) -> None:
        """Divide the gradients of a sum by its weight."""
        if wait_for_total is not None:
            gradients.scale_(self._list_local_gradients(), gradients.compute_weight_factor(wait_for_total()))

    def _list_local_gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def _sum_gradients(self, local: Sequence[torch.Tensor | None]) -> None:
        """Set each parameter's gradient to the sum over ranks."""
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
        """Return this rank's part of the global gradient, without DDP's hooks; all None without samples."""
        totals: list[torch.Tensor | None] = [None] * len(self._parameters)
        for count, batch in batches:
            self._phases.enter("forward")
            loss = loss_accumulator.add(*self._compute_loss(self._model, batch), count)
            self._phases.enter("backward")
            new = torch.autograd.grad(self._scale_loss(loss), self._parameters, allow_unused=True)
            dense = [g.to_dense() if g is not None and g.is_sparse else g for g in new]
            totals = gradients.add_optional(totals, dense)
        return totals

    def _clip_and_update(self) -> tuple[bool, float]:
        """Clip and update, unless a gradient is not finite. Return (whether all are finite, norm before clipping)."""
        self._phases.enter("update")
        if self._grad_scaler is not None:
            self._grad_scaler.unscale_(self.optimizer)
        norm = self._compute_grad_norm()
        # The norm may overflow although every gradient is finite.
        finite = math.isfinite(norm) or self._are_gradients_finite()
        if finite and (factor := gradients.compute_clip_factor(norm, self._clip_grad_norm)) < 1:
            gradients.scale_(self._list_local_gradients(), factor)
        if self._grad_scaler is not None:
            self._grad_scaler.step(self.optimizer)  # without an update after an overflow
            self._grad_scaler.update()
            finite = finite or self._grad_scaler.get_scale() >= 1
        elif finite:
            run_update(self.optimizer)
        return finite, norm

    def _compute_grad_norm(self) -> float:
        """Return the norm of all gradients together, by a fused operation since every step needs it."""
        values = [gradients.get_values(g) for g in self._list_local_gradients()]
        if not values:
            return 0.0
        if self._has_uniform_parameters and values[0].is_cpu:
            return math.hypot(*map(float, foreach_norm(values)))
        if self._has_uniform_parameters:
            return float(torch.linalg.vector_norm(torch.stack(foreach_norm(values))))
        return float(torch.nn.utils.get_total_norm(values))

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
        """Take a step with one explicit sum of gradients, for a probe or if a rank has no samples."""
        loss_accumulator = LossAccumulator(sum(counts))
        with self._share_written_tensors(counts), self._answer_router_losses(counts):
            local = self._compute_local_gradients(batches, loss_accumulator)
        wait_for_total = self._start_weight_reduce(loss_accumulator)
        self._sum_gradients(local)
        self._divide_by_weight(wait_for_total)
        if probe is not None:
            divisor = 1.0 if wait_for_total is None else float(wait_for_total())
            self._report_gradients(probe, loss_accumulator, counts, local, divisor)
        finite, norm = self._clip_and_update()
        if probe is not None and finite:
            probe.record_parameter_updates(float(self.optimizer.param_groups[0]["lr"]))
        return self._make_step_result(loss_accumulator, counts, finite=finite, norm=norm)

    def _share_written_tensors(
        self, counts: Sequence[int], process_group: ProcessGroup | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context for user code, after which all ranks have the frozen parameters and counters that it wrote.

        `process_group` has the ranks with the same part of the model; without, all ranks have the same part.
        """
        forwards = [min(count, self._num_micro_batches) for count in counts]
        return written_tensors.share(
            self._frozen_parameters, self._stateful_module, forwards, self._context, self._group, process_group
        )

    def _report_gradients(
        self,
        probe: StepProbe,
        loss_accumulator: LossAccumulator,
        counts: Sequence[int],
        local_gradients: Sequence[torch.Tensor | None],
        divisor: float,
    ) -> None:
        """Record the losses and gradients of a step."""
        weight = float(loss_accumulator.loss_weight)
        scale = 1.0 if self._grad_scaler is None else self._grad_scaler.get_scale()
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

    def visit_model(self, visitor: StateVisitor) -> None:
        """Visit the parameters, and the buffers weighted by samples."""
        self._visit_parameters(visitor)
        buffers, extra = split_state_dict(self._model)
        visitor.per_replica(MODEL_PREFIX, buffers, float(self._num_samples_seen))
        visitor.visit_extra_state(self._model, extra)

    def visit_state(self, visitor: StateVisitor) -> None:
        """Visit the model, the optimizer, plain numbers of modules, and the factor of fp16's loss."""
        self.visit_model(visitor)
        self._visit_numbers(visitor)
        visitor.visit_optimizer(
            "optimizer", self.optimizer, self.named_parameters(), per_rank=self._optimizer_differs_by_rank
        )
        self._num_samples_seen = visitor.per_rank(
            "seen", self._num_samples_seen, lambda seen: sum(seen) // visitor.world_size
        )
        if self._grad_scaler is not None:
            visitor.visit_stateful("scaler", self._grad_scaler, "the loss's scale")

    def _visit_numbers(self, visitor: StateVisitor) -> None:
        """Visit the numbers that differ from those at the beginning, which modules have as attributes."""
        changed = find_changes(self._stateful_module, self._initial_numbers) if visitor.is_saving else {}
        if changed or not visitor.is_saving:
            saved = visitor.per_rank("numbers", changed, lambda by_rank: by_rank[0])
            assign_numbers(self._stateful_module, self._initial_numbers | saved)

    def _visit_parameters(self, visitor: StateVisitor) -> None:
        """Visit parameters, which are equal on all ranks that hold them."""
        visitor.visit_tensors(MODEL_PREFIX, self.named_parameters())

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's parameters by all of their names."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    # -- the whole model --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """Evaluate the model of :meth:`averaged_model`."""
        with self.averaged_model() as model, module_eval_mode(model):
            yield lambda batch: self._loss_fn.evaluate_batch(model, batch)

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[torch.nn.Module]:
        """Average this rank's float buffers (batch statistics) over ranks by samples, within the context."""
        buffers = [b for b in self._model.buffers() if b.is_floating_point()]
        with self._averaged_tensors(buffers, float(self._num_samples_seen)):
            yield self._model

    @contextlib.contextmanager
    def _averaged_tensors(self, tensors: Sequence[torch.Tensor], weight: float) -> Iterator[None]:
        """Set tensors to their weighted mean over ranks, and restore them afterwards."""
        originals = [t.detach().clone() for t in tensors] if self._group is not None else []
        try:
            if originals and self._group is not None:
                total = self._group.all_reduce(torch.tensor([weight], dtype=torch.float64)).item()
                if total:
                    for tensor in tensors:
                        self._group.all_reduce(tensor.detach().mul_(weight / total))
            yield
        finally:
            for tensor, value in zip(tensors, originals, strict=False):
                tensor.detach().copy_(value)

    def compute_fingerprint(self) -> Fingerprint | None:
        """Return a checksum of all trainable parameters, which must be equal on all ranks."""
        return {(): compute_checksum(self._parameters)}

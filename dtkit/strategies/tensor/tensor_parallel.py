"""Tensor parallelism: each rank holds a slice of the layers, and all ranks of a replica compute on the same samples.

torch's own engine does the work (`parallelize_module`; Shoeybi et al., Megatron-LM, 2019): layers that a plan names
become DTensors and get hooks that gather or add up what passes through them. What the plan leaves out, every rank
holds whole and computes alike. With `replicas` there are several such groups of ranks, each with its own samples;
gradients are summed over them after backward, each rank's slices with the same slices elsewhere.

A plan can be wrong in ways that raise nothing: a layer with parameters between a colwise and a rowwise one has a
part of its gradient only. So the engine tries a plan before the first step: two rows go forward and backward through
the model before it is cut, and after, and the output, the loss and the norm of every gradient must agree.

Ranks of one replica draw the same random numbers, so that dropout agrees wherever they hold the same activations;
between a colwise and a rowwise layer, as within attention, each slice then drops the same places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    loss_parallel,
    parallelize_module,
)

from dtkit.engine.comm.process_group import is_lost_peer_error
from dtkit.engine.data.sources import to_device
from dtkit.engine.state.dtensor_shards import get_local_tensor, wrap_local_shard
from dtkit.mesh import Mesh
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.strategies import gradients
from dtkit.strategies.dtensor_worker import DTensorStrategy, DTensorWorker, build_device_meshes, sum_global_squares
from dtkit.strategies.options import check_count
from dtkit.strategies.replicated import LossAccumulator
from dtkit.strategies.tensor import plan as tensor_plan
from dtkit.strategies.tensor.attention import register_attention_sharding
from dtkit.strategies.tensor.collective_marks import mark_collectives, rank_span
from dtkit.strategies.tensor.styles import make_parallel_style

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.base import EvalFunction, StepResult, WorkerContext
    from dtkit.strategies.loss import EvalOutput, Loss
    from dtkit.strategies.tensor.plan import Style, TensorPlan

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative, between a model in slices and the whole one


@dataclasses.dataclass(frozen=True, repr=False)
class TensorParallel(DTensorStrategy):
    """Layers are cut into `tp_size` slices, one a rank; the ranks of a replica compute on the same samples.

    Parameters
    ----------
    tp_size
        Slices of each layer: ranks that share one replica of the model.
    plan
        {module name: style} with the styles of :mod:`dtkit.strategies.tensor.plan` ("colwise", "rowwise", ...), or
        torch's own ``ParallelStyle`` objects; ``*`` stands for one part of a name. Or "auto", which looks for pairs
        of layers and for attention, and is what is done without a plan: :meth:`plan_for` shows what it finds, and
        where you say "auto" yourself, that is printed before training begins.
    replicas
        Groups of `tp_size` ranks, each with samples of its own: `tp_size` x `replicas` is the world size.
    clip_grad_norm
        Largest norm of the whole gradient; larger ones are scaled down to it.
    accumulate
        Micro-batches that a replica's samples of a step come in, for less memory.

    """

    tp_size: int
    plan: Mapping[str, Style] | str | None = None
    replicas: int = 1
    clip_grad_norm: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_count("tp_size", self.tp_size)
        super().__post_init__()
        if isinstance(self.plan, str) and self.plan != "auto":
            raise ValueError(f"plan={self.plan!r}; it must be 'auto', or styles by module name: {_PLAN_EXAMPLE}")
        if not isinstance(self.plan, (str, dict, type(None))):
            raise TypeError(f"plan is a {type(self.plan).__name__}; it must be 'auto' or a dict: {_PLAN_EXAMPLE}")
        if self.plan == {}:
            raise ValueError(f"plan={{}} cuts nothing; name some modules, as in {_PLAN_EXAMPLE}, or use 'auto'")

    def build_mesh(self, world_size: int) -> Mesh:
        """Replicas of slices."""
        return Mesh({"dp": self.replicas, "tp": self.tp_size}).check(world_size, dp="replicas", tp="tp_size")

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError where the plan can't be followed in `model`."""
        self.plan_for(model)

    def plan_for(self, model: nn.Module) -> TensorPlan:
        """What is cut in `model`, as a table; ValueError where that is nothing, or can't be done."""
        if isinstance(self.plan, dict):
            return tensor_plan.validate_plan(model, self.tp_size, self.plan)
        return tensor_plan.find_plan(model, self.tp_size)

    def describe_plan(self, model: nn.Module) -> TensorPlan | None:
        """The plan that was asked for by "auto"."""
        return self.plan_for(model) if self.plan == "auto" else None

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """By the plan for the model; where the notebook does not have it, as if all matrices were cut, and only these.

        Activations are counted in full, which is the most. What layers send depends on the plan and on the sequence's
        length: it is not counted, nor the time it takes.
        """
        share = self._estimate_parameter_share(profile)
        rows = profile.rows * self.tp_size  # a replica's samples go through all of its ranks
        gradients = round(profile.gradients * share)
        return dataclasses.replace(
            Cost.for_replica(
                dataclasses.replace(profile, rows=rows),
                micro_batches=self.accumulate,
                gradients=2 * gradients if self.replicas > 1 else gradients,
                optimizer_state=round(profile.optimizer_state * share),
                temporaries=round(profile.update_temporaries * share),
                sent_bytes=math.nan if self.tp_size > 1 else compute_ring_bytes(gradients, self.replicas),
                exposed_s=benchmark.estimate_all_reduce_s(gradients) if self.replicas > 1 else 0.0,
            ),
            parameters=round(profile.parameters * share),
            compute_s=dataclasses.replace(profile, rows=rows).estimate_compute_s(self.accumulate) * share,
        )

    def _estimate_parameter_share(self, profile: ModelProfile) -> float:
        """Of the model's parameters, what each rank holds."""
        if profile.model is not None:
            rows = self.plan_for(profile.model).rows
            here, total = sum(row.local_parameters for row in rows), sum(row.parameters for row in rows)
        else:
            numbers = [(_count_elements(shape), len(shape) > 1) for shape in profile.gradient_shapes]
            here, total = sum(n // self.tp_size if cut else n for n, cut in numbers), sum(n for n, _ in numbers)
        return here / total if total else 1.0

    def _make_worker(
        self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> DTensorWorker:
        return _TensorParallelWorker(self, model, loss_fn, optimizer, context)


_PLAN_EXAMPLE = "{'fc1': 'colwise', 'fc2': 'rowwise'}"


def _count_elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


@dataclasses.dataclass(frozen=True)
class _PlanCheckResult:
    """What two rows made of a model."""

    outputs: list[torch.Tensor]
    loss: torch.Tensor
    grad_squares: torch.Tensor
    """Of each parameter's gradient, the sum over its numbers."""


class _TensorParallelWorker(DTensorWorker):
    """One rank's slices of its replica."""

    _strategy: TensorParallel

    def __init__(
        self,
        strategy: TensorParallel,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> None:
        assert context.group is not None
        self._plan = self.placement = strategy.plan_for(model)
        self._coordinates = context.mesh.get_coordinates(context.group.rank)
        self._loss_fn, self._context = loss_fn, context
        whole = [p for p in model.parameters() if p.requires_grad]
        before = None if context.make_sample_batch is None else self._run_plan_check(model, whole, [1] * len(whole))
        super().__init__(strategy, model, loss_fn, optimizer, context)
        if before is not None:
            self._check_plan(before)

    def _shard_model(self, model: nn.Module, group: Group) -> None:
        axes = build_device_meshes(group, self._context.mesh, self._context.device)
        self._dp_group = axes["dp"].get_group() if "dp" in axes else None
        self._tp_ranks = rank_span(axes["tp"].get_group())
        for name, style in self._plan.styles.items():
            module = model.get_submodule(name)
            parallelize_module(module, axes["tp"], make_parallel_style(module, style), src_data_rank=None)

    @property
    def _replica_index(self) -> int:
        return self._coordinates["dp"]

    @property
    def _reports_samples(self) -> bool:
        return self._coordinates["tp"] == 0

    @contextlib.contextmanager
    def _sharded_execution(self) -> Iterator[None]:
        """What must be so while slices compute."""
        styles = set(self._plan.styles.values())
        by_heads = not styles.isdisjoint(("heads", "fused"))
        fast = torch.backends.mha.get_fastpath_enabled()
        with contextlib.ExitStack() as stack:
            # The fast path of nn.TransformerEncoderLayer goes past its layers, and so past what cuts them.
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            if by_heads:
                register_attention_sharding()
            if "loss" in styles:
                stack.enter_context(loss_parallel())
            if by_heads or any(style == "loss" or not isinstance(style, str) for style in styles):
                stack.enter_context(implicit_replication())  # masks and targets are the same on all ranks
            yield

    # -- a step -----------------------------------------------------------------------------------------------

    def _run_step(self, batches: Sequence[tuple[int, Any]], counts: Sequence[int]) -> StepResult:
        """Forward and backward together with the ranks of this replica, a sum over replicas, each slice's update."""
        self._zero_grad()
        tally = LossAccumulator(sum(counts))
        with mark_collectives(self._phases, self._tp_ranks):
            local_gradients = self._compute_local_gradients(batches, tally)
        total = self._start_weight_reduce(tally)
        self._sum_gradients(local_gradients)
        self._divide_by_weight(total)
        finite, norm = self._clip_and_update()
        return self._make_step_result(tally, counts, finite=finite, norm=norm)

    def _compute_local_gradients(
        self, batches: Sequence[tuple[int, Any]], loss_accumulator: LossAccumulator
    ) -> list[torch.Tensor | None]:
        """This replica's part of the gradient, laid out as the parameters are; all None without a sample."""
        found: list[torch.Tensor | None] = [None] * len(self._parameters)
        for count, batch in batches:
            with self._sharded_execution():
                self._phases.enter("forward")
                value, weight = self._compute_loss(self._model, batch)
                loss = loss_accumulator.add(gather_full(value), weight, count)
                self._phases.enter("backward")
                new = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            own = [
                None if g is None else _redistribute_gradient(p, g) for p, g in zip(self._parameters, new, strict=True)
            ]
            found = [b if a is None else a if b is None else a + b for a, b in zip(found, own, strict=True)]
        return found

    def _sum_gradients(self, local_gradients: Sequence[torch.Tensor | None]) -> None:
        """Give each slice the sum of all replicas' gradients; none where no replica used it."""
        found = self._all_reduce_over_replicas(local_gradients) if self._strategy.replicas > 1 else local_gradients
        for p, gradient in zip(self._parameters, found, strict=True):
            p.grad = gradient

    def _all_reduce_over_replicas(self, local_gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One flat all-reduce among the ranks that hold the same slices."""
        parts = [None if g is None else get_local_tensor(g) for g in local_gradients]
        found = gradients.all_reduce_flat([get_local_tensor(p) for p in self._parameters], parts, self._all_reduce_flat)
        return [None if g is None else _wrap_gradient(p, g) for p, g in zip(self._parameters, found, strict=True)]

    def _all_reduce_flat(self, flat: torch.Tensor) -> None:
        assert self._group is not None
        assert self._dp_group is not None
        self._phases.enter("sync", rank_span(self._dp_group))
        self._group.all_reduce(flat, self._dp_group)

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """All ranks of a replica compute, the first one tells."""
        with super().eval_mode() as forward, self._sharded_execution():
            yield lambda batch: self._gather_eval_output(forward(batch))

    def _gather_eval_output(self, eval_output: EvalOutput | None) -> EvalOutput | None:
        assert eval_output is not None
        found = dataclasses.replace(
            eval_output, output=gather_full(eval_output.output), loss=gather_full(eval_output.loss)
        )
        return found if self._reports_samples else None

    # -- does the plan hold? ----------------------------------------------------------------------------------

    def _run_plan_check(
        self, model: nn.Module, parameters: Sequence[torch.Tensor], num_holders: Sequence[int]
    ) -> _PlanCheckResult:
        """Two rows forward and backward, without dropout and without touching batch statistics."""
        assert self._context.make_sample_batch is not None
        device = parameters[0].device  # the whole model may not be on this rank's own
        batch = to_device(self._context.make_sample_batch(2), device)
        model.eval()
        try:  # cudnn has no backward of recurrent layers in evaluation
            with self._sharded_execution(), torch.backends.cudnn.flags(enabled=False):
                forecast = self._loss_fn.evaluate_batch(model, batch)
                loss = gather_full(forecast.loss)
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
        finally:
            model.train()
        own = [
            loss.new_zeros(1) if g is None else get_local_tensor(_redistribute_gradient(p, g))
            for p, g in zip(parameters, found, strict=True)
        ]
        outputs = [t.detach().to(self._context.device) for t in _find_float_tensors(gather_full(forecast.output))]
        sums = sum_global_squares(own, num_holders, device).to(self._context.device)
        return _PlanCheckResult(outputs, loss.detach().to(self._context.device), sums)

    def _check_plan(self, before: _PlanCheckResult) -> None:
        """Raise ValueError where the model in slices is not the one that was cut."""
        assert self._group is not None
        try:
            after = self._run_plan_check(self._model, self._parameters, self._num_holders)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            if is_lost_peer_error(error):
                raise
            raise ValueError(
                self._format_plan_error(f"can't compute ({type(error).__name__}: {error})", _PARTIAL_OUTPUT_ADVICE)
            ) from error
        self._group.all_reduce(after.grad_squares)
        wrong = self._describe_difference(before, after)
        if self._group.all_reduce_any(bool(wrong)):
            raise ValueError(
                self._format_plan_error(
                    f"computes something else: {wrong or 'so other ranks say'}", _ELEMENTWISE_ADVICE
                )
            )

    def _describe_difference(self, before: _PlanCheckResult, after: _PlanCheckResult) -> str:
        """What differs from the whole model: outputs, the loss, or gradients; empty where all is well."""
        tolerance = _TOLERANCE.get(before.loss.dtype, 5e-2)
        pairs = [*zip(before.outputs, after.outputs, strict=True), (before.loss, after.loss)]
        if any(a.shape != b.shape or _compute_relative_difference(a, b) > tolerance for a, b in pairs):
            return "its output or loss differs"
        expected, found = before.grad_squares.sqrt(), after.grad_squares.sqrt()
        apart = (expected - found).abs() > tolerance * (torch.maximum(expected, found) + expected.max())
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        wrong = [name for name, bad in zip(names, apart.tolist(), strict=True) if bad]
        return f"the gradients of {', '.join(wrong)} differ" if wrong else ""

    def _format_plan_error(self, problem: str, advice: str) -> str:
        name = type(self._meta_model).__name__
        return f"{name} in {self._strategy.tp_size} slices {problem}. {advice}. The plan was:\n{tensor_plan.format_plan(self._plan)}"


_PARTIAL_OUTPUT_ADVICE = (
    "What follows a colwise layer gets a part of its outputs, until a rowwise layer adds up; 'gathered' gives all of "
    "them. Change the plan, or leave such layers out of it"
)
_ELEMENTWISE_ADVICE = (
    "Between a colwise and a rowwise layer there may be nothing but what does the same with each number: no other "
    "parameters, and no sums over features. Change the plan, or leave such layers out of it"
)


def gather_full(value: Any) -> Any:
    """DTensors as whole tensors, also within tuples, lists and dicts. A collective among the ranks that share them."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        return get_local_tensor(value)
    if isinstance(value, dict):
        return {key: gather_full(entry) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(gather_full, value))
    return value


def _find_float_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of floating-point numbers in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for entry in entries for tensor in _find_float_tensors(entry)]


def _compute_relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, next to the largest number."""
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())  # infinities of a mask among them
    difference = (a - b).abs().masked_fill(same, 0.0).max()
    return float(difference / a.nan_to_num(posinf=0, neginf=0).abs().max().clamp(min=1e-6))


def _redistribute_gradient(p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient, laid out as its parameter is."""
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        wanted = p.placements if isinstance(p, DTensor) else (Replicate(),) * mesh.ndim
        gradient = gradient if gradient.placements == wanted else gradient.redistribute(mesh, wanted)
    found = get_local_tensor(gradient)
    if isinstance(gradient, DTensor) and isinstance(p, DTensor) and not found.is_sparse:
        return gradient  # as it is: making a DTensor of a part costs as much as a small operation on it
    return _wrap_gradient(p, found.to_dense() if found.is_sparse else found)


def _wrap_gradient(p: torch.Tensor, local_gradient: torch.Tensor) -> torch.Tensor:
    """What lies here of a gradient, made into one."""
    return wrap_local_shard(local_gradient, p) if isinstance(p, DTensor) else local_gradient


# --- torch's styles -----------------------------------------------------------------------------------------





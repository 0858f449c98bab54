"""Tensor parallelism: each rank holds a slice of the layers, and all ranks of a replica compute on the same samples.

torch's `parallelize_module` does the work (Shoeybi et al., Megatron-LM, 2019). The layers of a plan become DTensors
with hooks that gather or sum their inputs and outputs. Every rank holds the other layers whole, and computes them
identically. With `replicas` there are several such groups of ranks, each with its own samples. Gradients are summed
after backward among the ranks with the same slices.

Before the first step, each engine checks the plan (:mod:`dtkit.strategies.tensor.plan_check`).

Ranks of one replica draw the same random numbers, so that dropout agrees for equal activations. Between a colwise and
a rowwise layer, as within attention, each slice then drops the same positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    loss_parallel,
    parallelize_module,
)

from dtkit._util.arguments import suggest_options
from dtkit._util.formatting import name_type
from dtkit._util.guard import run_guarded
from dtkit.engine.comm.process_group import is_lost_peer_error
from dtkit.engine.data.sources import to_device
from dtkit.engine.state.dtensor_shards import get_local_tensor
from dtkit.mesh import Mesh
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.strategies import gradients
from dtkit.strategies.dtensor_worker import DTensorStrategy, DTensorWorker, build_device_meshes
from dtkit.strategies.kv_cache import disable_kv_cache
from dtkit.strategies.options import check_count
from dtkit.strategies.replicated import LossAccumulator
from dtkit.strategies.tensor import plan as tensor_plan
from dtkit.strategies.tensor.attention import HeadMaskSharding, register_attention_sharding
from dtkit.strategies.tensor.auto_plan import find_plan
from dtkit.strategies.tensor.collective_marks import mark_collectives, rank_span
from dtkit.strategies.tensor.layout import gather_full, redistribute_gradient, wrap_gradient
from dtkit.strategies.tensor.plan_check import (
    ELEMENTWISE_ADVICE,
    PARTIAL_OUTPUT_ADVICE,
    PlanCheckResult,
    describe_difference,
    run_plan_check,
)
from dtkit.strategies.tensor.styles import make_parallel_style

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.base import EvalFunction, StepResult
    from dtkit.strategies.loss import EvalOutput, Loss
    from dtkit.strategies.tensor.plan import Style, TensorPlan


@suggest_options
@dataclasses.dataclass(frozen=True, repr=False)
class TensorParallel(DTensorStrategy):
    """Layers in `tp_size` slices, one per rank; the ranks of a replica compute on the same samples.

    torch's DTensor does the work (Shoeybi et al., Megatron-LM, 2019). Ranks exchange activations in every layer, so
    keep the ranks of a replica on one host.

    Parameters
    ----------
    tp_size
        Number of slices of each layer, and of ranks per replica.
    plan
        {module name: style} with the styles of :mod:`dtkit.strategies.tensor.plan` ("colwise", "rowwise", ...) or
        torch's ``ParallelStyle`` objects; ``*`` matches one part of a name. The default looks for pairs of layers and
        for attention, as :meth:`plan_for` shows. "auto" does the same and prints the plan before training.
    replicas
        Number of groups of `tp_size` ranks, each with its own samples: `tp_size` x `replicas` is the world size.
    clip_grad_norm
        Largest norm of the whole gradient; a larger gradient is scaled down to it.
    accumulate
        Number of micro-batches of a replica's samples in a step; more of them need less memory.

    """

    tp_size: int
    plan: Mapping[str, Style] | str | None = None
    replicas: int = 1
    clip_grad_norm: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("tp_size", self.tp_size)
        super().__post_init__()
        if isinstance(self.plan, str) and self.plan != "auto":
            raise ValueError(f"plan={self.plan!r}; it must be 'auto', or styles by module name: {_PLAN_EXAMPLE}")
        if not isinstance(self.plan, (str, dict, type(None))):
            raise TypeError(f"plan is {name_type(self.plan)}; it must be 'auto' or a dict: {_PLAN_EXAMPLE}")
        if self.plan == {}:
            raise ValueError(f"plan={{}} shards nothing; name some modules, as in {_PLAN_EXAMPLE}, or use 'auto'")

    def build_mesh(self, world_size: int) -> Mesh:
        """Return replicas of slices."""
        return Mesh({"dp": self.replicas, "tp": self.tp_size}).check(world_size, dp="replicas", tp="tp_size")

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError if the plan doesn't fit `model`."""
        self.plan_for(model)

    def plan_for(self, model: nn.Module) -> TensorPlan:
        """Return the plan for `model` as a table; raise ValueError if there is none or it doesn't fit."""
        if isinstance(self.plan, dict):
            return tensor_plan.validate_plan(model, self.tp_size, self.plan)
        return find_plan(model, self.tp_size)

    def describe_plan(self, model: nn.Module) -> TensorPlan | None:
        """Return the plan if the user asked for "auto"."""
        return self.plan_for(model) if self.plan == "auto" else None

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """Return the cost by the plan for the model, or with all matrices sharded if the model is unknown here.

        Activations count as whole, which is an upper bound. Communication of layers depends on the plan and on the
        sequence length, and doesn't count.
        """
        share = self._estimate_parameter_share(profile)
        rows = profile.rows * self.tp_size  # all ranks of a replica take all of its samples
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
        """Return the share of the model's parameters that each rank holds."""
        if profile.model is not None:
            rows = self.plan_for(profile.model).rows
            local, total = sum(row.local_parameters for row in rows), sum(row.parameters for row in rows)
        else:
            sizes = [(_count_elements(shape), len(shape) > 1) for shape in profile.gradient_shapes]
            local, total = sum(n // self.tp_size if sharded else n for n, sharded in sizes), sum(n for n, _ in sizes)
        return local / total if total else 1.0

    def _make_worker(
        self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> DTensorWorker:
        return _TensorParallelWorker(self, model, loss_fn, optimizer, context)


_PLAN_EXAMPLE = "{'fc1': 'colwise', 'fc2': 'rowwise'}"


def _count_elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


class _TensorParallelWorker(DTensorWorker):
    """Worker with one rank's slices of its replica."""

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
        by_heads = [name for name, style in self._plan.styles.items() if style == "heads"]
        self._has_head_biases = any(isinstance(model.get_submodule(name), nn.Embedding) for name in by_heads)
        whole = [p for p in model.parameters() if p.requires_grad]
        before = None if context.make_sample_batch is None else self._run_plan_check(model, whole, [1] * len(whole))
        super().__init__(strategy, model, loss_fn, optimizer, context)
        if before is not None:
            self._check_plan(before)
        self._share_over_replicas()

    def _share_over_replicas(self) -> None:
        if self._dp_group is not None:
            self._share_router_losses(self._dp_group)

    def settle(self) -> None:
        """Move to the current process group. A collective if it is new."""
        is_stale = self._has_stale_group
        super().settle()
        if is_stale:
            self._share_over_replicas()

    def _shard_model(self, model: nn.Module, group: Group) -> None:
        axes = build_device_meshes(group, self._context.mesh, self._context.device)
        self._dp_group = axes["dp"].get_group() if "dp" in axes else None
        self._tp_ranks = rank_span(axes["tp"].get_group())
        disable_kv_cache(model)
        for name, style in self._plan.styles.items():
            module = model.get_submodule(name)
            parallelize_module(module, axes["tp"], make_parallel_style(module, style), src_data_rank=None)

    @property
    def _reports_samples(self) -> bool:
        return self._coordinates["tp"] == 0

    @contextlib.contextmanager
    def _sharded_execution(self) -> Iterator[None]:
        """Set torch's options for computing with slices, within the context."""
        styles = set(self._plan.styles.values())
        by_heads = not styles.isdisjoint(("heads", "fused"))
        fast = torch.backends.mha.get_fastpath_enabled()
        with contextlib.ExitStack() as stack:
            # The fast path of nn.TransformerEncoderLayer bypasses its layers with their hooks.
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            if by_heads:
                register_attention_sharding()
            if self._has_head_biases:
                stack.enter_context(HeadMaskSharding())
            if "loss" in styles:
                stack.enter_context(loss_parallel())
            if by_heads or any(style == "loss" or not isinstance(style, str) for style in styles):
                stack.enter_context(implicit_replication())  # masks and targets are the same on all ranks
            yield

    # -- a step -----------------------------------------------------------------------------------------------

    def _run_step(self, batches: Sequence[tuple[int, Any]], counts: Sequence[int]) -> StepResult:
        """Run forward and backward with this replica's ranks, sum over replicas, and update the slices."""
        self._zero_grad()
        loss_accumulator = LossAccumulator(sum(counts))
        with (
            self._share_written_tensors(counts, self._dp_group),
            mark_collectives(self._phases, self._tp_ranks, self._group),
            self._answer_router_losses(counts),
        ):
            local_gradients = self._compute_local_gradients(batches, loss_accumulator)
        total = self._start_weight_reduce(loss_accumulator)
        self._sum_gradients(local_gradients)
        self._divide_by_weight(total)
        finite, norm = self._clip_and_update()
        return self._make_step_result(loss_accumulator, counts, finite=finite, norm=norm)

    def _compute_local_gradients(
        self, batches: Sequence[tuple[int, Any]], loss_accumulator: LossAccumulator
    ) -> list[torch.Tensor | None]:
        """Return this replica's part of the gradient, placed like the parameters; all None without samples."""
        totals: list[torch.Tensor | None] = [None] * len(self._parameters)
        for count, batch in batches:
            with self._sharded_execution():
                self._phases.enter("forward")
                value, weight = self._compute_loss(self._model, batch)
                loss = loss_accumulator.add(gather_full(value), weight, count)
                self._phases.enter("backward")
                new = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            local_gradients = [
                None if g is None else redistribute_gradient(p, g) for p, g in zip(self._parameters, new, strict=True)
            ]
            totals = gradients.add_optional(totals, local_gradients)
        return totals

    def _sum_gradients(self, local_gradients: Sequence[torch.Tensor | None]) -> None:
        """Set each slice's gradient to the sum over replicas; None if no replica used it."""
        sums = self._all_reduce_over_replicas(local_gradients) if self._strategy.replicas > 1 else local_gradients
        for p, gradient in zip(self._parameters, sums, strict=True):
            p.grad = gradient

    def _all_reduce_over_replicas(self, local_gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Sum in one flat all-reduce among the ranks with the same slices."""
        parts = [None if g is None else get_local_tensor(g) for g in local_gradients]
        sums = gradients.all_reduce_flat([get_local_tensor(p) for p in self._parameters], parts, self._all_reduce_flat)
        return [None if g is None else wrap_gradient(p, g) for p, g in zip(self._parameters, sums, strict=True)]

    def _all_reduce_flat(self, flat: torch.Tensor) -> None:
        assert self._group is not None
        assert self._dp_group is not None
        self._phases.enter("sync", rank_span(self._dp_group))
        self._group.all_reduce(flat, self._dp_group)

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """Evaluate on all ranks of a replica; the first one returns the output."""
        with super().eval_mode() as forward, self._sharded_execution():
            yield lambda batch: self._gather_eval_output(forward(batch))

    def _gather_eval_output(self, eval_output: EvalOutput | None) -> EvalOutput | None:
        assert eval_output is not None
        output, loss = gather_full(eval_output.output), gather_full(eval_output.loss)
        return dataclasses.replace(eval_output, output=output, loss=loss) if self._reports_samples else None

    # -- the check of the plan --------------------------------------------------------------------------------

    def _run_plan_check(
        self, model: nn.Module, parameters: Sequence[torch.Tensor], num_holders: Sequence[int]
    ) -> PlanCheckResult:
        """Run two rows forward and backward."""
        assert self._context.make_sample_batch is not None
        batch = to_device(self._context.make_sample_batch(2), parameters[0].device)  # may be the host
        with self._sharded_execution():
            result = run_plan_check(model, self._loss_fn, batch, parameters, num_holders)
        return result.to(self._context.device)

    def _check_plan(self, before: PlanCheckResult) -> None:
        """Raise ValueError if the sliced model computes something else than the whole model did."""
        assert self._group is not None

        def refuse(error: Exception) -> NoReturn:
            if is_lost_peer_error(error):
                raise error
            problem = f"can't compute ({type(error).__name__}: {error})"
            raise ValueError(self._format_plan_error(problem, PARTIAL_OUTPUT_ADVICE)) from error

        # The whole model could compute the same rows, so any error is the plan's.
        after = run_guarded(lambda: self._run_plan_check(self._model, self._parameters, self._num_holders), refuse)
        self._group.all_reduce(after.grad_squares)
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        difference = describe_difference(before, after, names)
        if self._group.all_reduce_any(bool(difference)):
            problem = f"computes something else: {difference or 'other ranks report a difference'}"
            raise ValueError(self._format_plan_error(problem, ELEMENTWISE_ADVICE))

    def _format_plan_error(self, problem: str, advice: str) -> str:
        name, plan = type(self._meta_model).__name__, tensor_plan.format_plan(self._plan)
        return f"{name} in {self._strategy.tp_size} slices {problem}. {advice}. The plan was:\n{plan}"


# --- torch's styles -----------------------------------------------------------------------------------------

"""Pipeline parallelism: the model in stages on different ranks, which work on micro-batches.

torch's pipelining does the work. See Huang et al., NeurIPS 2019 (GPipe), Narayanan et al., SOSP 2019 (1F1B) and SC 2021
(interleaved), and Qi et al., ICLR 2024 (zero bubble).

*Shapes are fixed.* torch's receive buffers have the shape of the first micro-batch. A larger message would abort the
process. So every step has the same number of micro-batches of one size. Copies of the first row pad a smaller
micro-batch, and the loss excludes them. That is exact if each row's output depends only on that row. Batch
normalization mixes rows, so its statistics include the copies; micro-batches without samples leave them unchanged.
Forward passes before the first step determine the shapes between stages.

*A device holds only its stages.* A rank cuts the whole model on the host, and copies its own stages to its device. The
device of rank 0 also gets each layer once, to time it.

*Only the last stage knows the loss*, so only its rank reports one. The norm of gradients is summed over stages.

*The order is a table* (:mod:`dtkit.schedules.schedule`), one of torch's or the user's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtkit._util.arguments import suggest_options
from dtkit._util.formatting import format_count
from dtkit.engine.data.sources import map_tensors, to_device
from dtkit.mesh import Mesh
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.planning.layer_chain import LayerChain, LayerCosts
from dtkit.schedules.builtin import get_proper_name
from dtkit.schedules.schedule import Schedule
from dtkit.strategies import router_loss
from dtkit.strategies.activation_checkpointing import refuse_batch_norm
from dtkit.strategies.base import Strategy, Worker
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.loss import ModelInputs
from dtkit.strategies.options import check_choice, check_count, check_names, check_positive
from dtkit.strategies.pipeline import layer_costs
from dtkit.strategies.pipeline.cut import StageCut, balance_stages, even_out_ranks, find_layer_chain, find_named_starts
from dtkit.strategies.pipeline.masked_rows import require_maskable_labels
from dtkit.strategies.pipeline.tied_weights import find_tied_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.loss import Loss
    from dtkit.strategies.pipeline.worker import PlacedStages


@suggest_options
@dataclasses.dataclass(frozen=True, repr=False)
class Pipeline(Strategy):
    """The model in stages that work at the same time, each on another micro-batch (Huang et al., NeurIPS 2019).

    `stages` x `replicas` is the world size. The model is a chain of layers, such as an ``nn.Sequential``, or one that
    torch can trace.

    Parameters
    ----------
    stages
        Number of ranks of each replica.
    micro_batches
        Number of micro-batches of a replica's samples in a step; more of them leave less idle time. A custom schedule
        determines it.
    schedule
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS" or "ZBVZeroBubble". The last four
        give each rank two stages. Or a custom table: a :class:`dtkit.Schedule`, or its rows, as in
        ``["F0 F1 B0 B1", "F0 B0 F1 B1"]``, one for each rank.
    replicas
        Copies of the pipeline, each with its part of every batch.
    split
        Names of the layers at which the second and later stages begin. By default dtkit cuts the chain of layers so
        that the slowest stage is as fast as possible.
    balance_by
        Cost of a layer for dtkit's cut: its measured "time", or its "parameters". Measured times may cut another run
        elsewhere. Each stage draws its own dropout, so use `split` or "parameters" to repeat a run with dropout.
    clip_grad_norm
        Largest norm of the whole gradient, over all stages.

    """

    stages: int
    micro_batches: int = 0
    schedule: str | Schedule | Sequence[str | Sequence[str | None]] = "1F1B"
    replicas: int = 1
    split: Sequence[str] | None = None
    balance_by: str = "time"
    clip_grad_norm: float | None = None

    shards_model = True

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("stages", self.stages)
        self._normalize_schedule()
        if self.micro_batches == 0 and not isinstance(self.micro_batches, bool):  # left out
            raise ValueError(
                f"Pipeline(stages={self.stages}) trains on {self.stages} engines, or a multiple of them with "
                "replicas=. It also needs the number of micro-batches of a step, such as "
                f"micro_batches={4 * self.stages}. More of them leave less idle time; a custom schedule determines it"
            )
        check_count("micro_batches", self.micro_batches)
        check_count("replicas", self.replicas)
        check_positive("clip_grad_norm", self.clip_grad_norm)
        check_choice("balance_by", self.balance_by, ("time", "parameters"))
        assert self.pipeline_schedule.ranks == self.stages  # builds a named schedule, which checks itself
        object.__setattr__(self, "split", check_names("split", self.split))

    def _normalize_schedule(self) -> None:
        """Convert a user's rows to a schedule, and take the number of micro-batches from it."""
        if isinstance(self.schedule, str) and len(self.schedule.split()) == 1:
            object.__setattr__(self, "schedule", get_proper_name(self.schedule))
            return
        table = self.schedule if isinstance(self.schedule, Schedule) else Schedule(self.schedule)
        if table.ranks != self.stages:
            raise ValueError(
                f"stages={self.stages}, and the schedule has {table.ranks} rows; it needs one row per rank. Use "
                f"stages={table.ranks}, or write {self.stages} rows"
            )
        if self.micro_batches not in (0, table.micro_batches):
            raise ValueError(
                f"micro_batches={self.micro_batches}, and the schedule has {table.micro_batches}. Leave micro_batches "
                "out, or write a schedule with that number"
            )
        object.__setattr__(self, "schedule", table)
        object.__setattr__(self, "micro_batches", table.micro_batches)

    @functools.cached_property
    def pipeline_schedule(self) -> Schedule:  # type: ignore[override]  # determined by `schedule`
        """The order of each rank's actions."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        assert isinstance(self.schedule, str)
        return Schedule.from_name(self.schedule, self.stages, self.micro_batches)

    @property
    def num_micro_batches(self) -> int:
        """Return `micro_batches`."""
        return self.micro_batches

    def check(self, world_size: int, batch_size: int) -> None:  # noqa: ARG002 - a replica's share has no other divisor
        """Raise ValueError if a replica's samples of a step are fewer than its micro-batches.

        The last batch of an epoch may be shorter.
        """
        share = batch_size // self.replicas
        if self.micro_batches > share >= 1:
            where = f" on each of {self.replicas} replicas" if self.replicas > 1 else ""
            raise ValueError(
                f"micro_batches={self.micro_batches} with batch_size={batch_size}: {share} samples{where} fill at most "
                f"{share} micro-batches, and the others would be empty. Use micro_batches={share} or less, or a "
                f"batch_size of {self.micro_batches * self.replicas} or more"
            )

    def build_mesh(self, world_size: int) -> Mesh:
        """Return replicas of pipelines, whose stages are on consecutive ranks."""
        return Mesh({"dp": self.replicas, "pp": self.stages}).check(world_size, dp="replicas", pp="stages")

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """Return the cost for the model's cut, or for equal stages if its layers are unknown.

        A simulation of the schedule gives its time, and the number of micro-batches whose activations a rank holds.
        All stages count with equal activations.
        """
        rank, stages = profile.rank % self.stages, self.pipeline_schedule.stages
        rows = math.ceil(profile.rows * self.stages / self.micro_batches)  # of one micro-batch
        time_shares, parameter_shares, outputs = self._estimate_stage_shares(profile.layer_chain)
        simulation = self.pipeline_schedule.simulate(
            profile.forward_s.predict(rows), profile.backward_s.predict(rows), time_shares
        )
        share = sum(parameter_shares[stage] for stage in self.pipeline_schedule.get_stages(rank))
        gradients = round(profile.gradients * share)
        activations = (
            profile.activations.intercept + profile.activations.slope * rows * simulation.peak_micro_batches[rank]
        )
        buffers = round(self._estimate_buffer_bytes(rank, outputs) * rows * self.micro_batches)
        return Cost(
            parameters=round(profile.parameters * share),
            gradients=gradients,
            optimizer_state=round(profile.optimizer_state * share),
            activations=round(activations / stages)
            + buffers
            + min(gradients, self._estimate_temporary_gradients(profile)),
            temporaries=round(profile.update_temporaries * share) + (gradients if self.replicas > 1 else 0) + buffers,
            overhead=round(profile.overhead.predict(rows)),
            sent_bytes=compute_ring_bytes(gradients, self.replicas)
            + self._estimate_sent_bytes(rank, outputs) * rows * self.micro_batches,
            compute_s=simulation.makespan + profile.update_s * share,
            exposed_communication_s=benchmark.estimate_all_reduce_s(gradients) if self.replicas > 1 else 0.0,
        )

    def _estimate_stage_shares(
        self, layers: LayerChain | None
    ) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return each stage's (shares of time, shares of parameters, output bytes per row), as far as known."""
        count = self.pipeline_schedule.stages
        if layers is None:
            return (1 / count,) * count, (1 / count,) * count, (0.0,) * count
        equal = LayerCosts((1.0,) * len(layers.names))
        costs = layers.parameter_counts if self.balance_by == "parameters" else layers.seconds or equal
        cut = self._cut_by_cost(layers.names, costs)
        outputs = layers.output_bytes or (0.0,) * len(layers.names)
        border_bytes = [outputs[stage[-1]] for stage in cut.stages[:-1]]
        return (
            cut.compute_stage_shares(layers.seconds or equal),
            cut.compute_stage_shares(layers.parameter_counts),
            (*border_bytes, 0.0),
        )

    def _estimate_sent_bytes(self, rank: int, outputs: Sequence[float]) -> float:
        """Return the bytes of outputs and gradients that this rank sends to others, per row."""
        ranks = self.pipeline_schedule.stage_ranks
        borders = [(k, k + 1) for k in range(len(ranks) - 1) if ranks[k] != ranks[k + 1]]
        return sum(outputs[k] for k, following in borders if rank in (ranks[k], ranks[following]))

    def _estimate_buffer_bytes(self, rank: int, outputs: Sequence[float]) -> float:
        """Return the bytes of this rank's receive buffers per row: inputs of stages and gradients of outputs.

        torch allocates one of each for every micro-batch in the first step.
        """
        borders = (0.0, *outputs)
        return sum(borders[stage] + borders[stage + 1] for stage in self.pipeline_schedule.get_stages(rank))

    def _estimate_temporary_gradients(self, profile: ModelProfile) -> int:
        """Return the bytes of temporary gradients: a new one next to the sum that it is added to.

        With backward in halves, torch holds two.
        """
        sizes = [math.prod(shape) for shape in profile.gradient_shapes]
        has_halves = any(action and action.kind == "W" for row in self.pipeline_schedule.rows for action in row)
        return round((1 + has_halves) * profile.gradients * max(sizes) / sum(sizes)) if any(sizes) else 0

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError if `model` has too few layers in a chain, or lacks those that `split` names.

        So for a mixture of experts with the routers' loss: stages don't record the routers' outputs.
        """
        if router_loss.is_in_model(model):
            raise ValueError(
                f"{type(model).__name__} adds the routers' loss to its own (output_router_logits=True), and stages "
                "don't record the routers' outputs. Use strategy=dtkit.Sharded() or dtkit.DataParallel(), or set "
                "model.config.output_router_logits = False"
            )
        self._find_split_points(self._find_layer_names(model))

    def plan_for(self, model: nn.Module, *inputs: torch.Tensor) -> StageCut:
        """Return the cut of `model` and the costs of its stages as a table; raise ValueError if it can't be cut.

        `inputs` are the model's inputs for a micro-batch. Time is measured in this process and without a loss, so
        engines may measure other times.
        """
        names = self._find_layer_names(model)
        if not inputs:
            raise TypeError("plan_for needs the model's inputs for a micro-batch: plan_for(model, X[:8])")
        if self.balance_by == "time":
            costs = layer_costs.measure_seconds(model, ModelInputs(inputs), inputs[0].device)
        else:
            costs = layer_costs.count_by_layer(model, ModelInputs(inputs))
        return self._cut_by_cost(names, costs)

    def preload(self, model: nn.Module | None, group: Group | None) -> None:  # noqa: ARG002 - always the same
        """Load the modules that a first trace loads."""
        from dtkit.strategies.pipeline import trace, worker

        del worker
        trace.preload_exporter()

    def reduce_batch(self, batch: Any) -> Any:
        """Return the batch with empty inputs if the first rank has the first stage; others need its target only."""
        if self.pipeline_schedule.stage_ranks[0] != 0:
            return batch
        if isinstance(batch, Mapping):
            return {name: value if name == "labels" else _drop_values(value) for name, value in batch.items()}
        return (*_drop_values(batch[:-1]), batch[-1]) if isinstance(batch, tuple) else batch

    def setup(self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext) -> Worker:
        """Return a worker with this rank's stages, or with the whole model without a process group."""
        if context.group is None:
            whole = DataParallel(accumulate=self.micro_batches, clip_grad_norm=self.clip_grad_norm)
            return whole.setup(copy.deepcopy(model), loss_fn, optimizer, context)
        if loss_fn.training_step is not None:
            raise ValueError(
                "a pipeline needs loss=, a function of (output, target), or a model that returns its own loss. "
                "training_step= runs the whole model, but in a pipeline no rank has all of it"
            )
        if context.recomputes_stages:
            self._check_recomputation(model)
        from dtkit.strategies.pipeline.worker import PipelineWorker  # loads torch's pipelining, for seconds

        placed = self._place_stages(model, loss_fn, context)
        return PipelineWorker(self, placed, loss_fn, optimizer, context, clip_grad_norm=self.clip_grad_norm)

    def _check_recomputation(self, model: nn.Module) -> None:
        """Raise ValueError if stages can't compute again in backward."""
        refuse_batch_norm(model)
        if any(action and action.kind == "W" for row in self.pipeline_schedule.rows for action in row):
            raise ValueError(
                f"{self.pipeline_schedule.name} runs backward in two passes, and activation_checkpointing would "
                "compute each stage again in both. Use schedule='1F1B'"
            )

    def _place_stages(self, model: nn.Module, loss_fn: Loss, context: WorkerContext) -> PlacedStages:
        """Cut the model on the host, and copy only this rank's stages to its device."""
        from dtkit.strategies.pipeline.stage import infer_stage_io
        from dtkit.strategies.pipeline.trace import copy_stages_to_device, named_tensors, split_model, to_model_name
        from dtkit.strategies.pipeline.worker import PlacedStages, require_tensor_inputs

        assert context.make_sample_batch is not None
        assert context.group is not None
        batch = context.make_sample_batch(-(-context.max_local_samples // self.micro_batches))
        inputs, target = loss_fn.split_batch(batch)
        require_tensor_inputs(inputs.values)
        if loss_fn.is_from_model:
            require_maskable_labels(target)
        cut = self._choose_cut(model, batch, loss_fn, context)
        parts = split_model(model, cut, inputs, context.device)
        tied = find_tied_parameters(
            model, [set(named_tensors(part.module)) for part in parts], self.pipeline_schedule.stage_ranks
        )
        staged = {to_model_name(name) for part in parts for name in part.module.state_dict()}
        staged.update(name for each in tied for name in each.names)
        unstaged = {name: _copy_to_cpu(value) for name, value in model.state_dict().items() if name not in staged}
        stages = self.pipeline_schedule.get_stages(context.mesh.get_coordinates(context.group.rank)["pp"])
        modules = copy_stages_to_device({stage: parts[stage] for stage in stages}, model, context.device)
        stage_ranks = [context.mesh.get_rank(pp=rank) for rank in self.pipeline_schedule.stage_ranks]
        stage_io = infer_stage_io(modules, stage_ranks, to_device(inputs.values, context.device), context.group)
        for pair in modules.values():
            pair.training.recomputes = context.recomputes_stages
        return PlacedStages(cut, modules, stage_io, unstaged, model, tied)

    def _choose_cut(self, model: nn.Module, batch: Any, loss_fn: Loss, context: WorkerContext) -> StageCut:
        """Return the cut by `split`, or by the costs that rank 0 measures, so that all ranks cut alike."""
        names = self._find_layer_names(model)
        if (starts := self._find_split_points(names)) is not None:
            return StageCut(
                names, layer_costs.count_by_layer(model, loss_fn.split_batch(batch)[0]), starts, "parameters"
            )
        assert context.group is not None
        costs = torch.zeros(len(names) + 2, dtype=torch.float64)
        if context.group.rank == 0:
            measured = self._measure_layer_costs(model, batch, loss_fn, context.device)
            values = [measured.before_layers, *measured.layers, measured.after_layers]
            costs += torch.tensor(values, dtype=torch.float64)
        before, *layers, after = context.group.all_reduce(costs).tolist()
        return self._cut_by_cost(names, LayerCosts(tuple(layers), before, after))

    def _find_layer_names(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the layers at which `model` may be cut; raise ValueError for too few."""
        names = tuple(name for name, _ in find_layer_chain(model))
        if len(names) < self.pipeline_schedule.stages:
            found = f"{format_count(len(names), 'layer')} ({', '.join(names)})" if names else "no layers"
            raise ValueError(
                f"{type(model).__name__} has {found} in a chain, too few "
                f"for {self.pipeline_schedule.stages} stages. dtkit can cut an nn.Sequential, or a model with an "
                "nn.ModuleList of blocks. Use fewer stages, or strategy=dtkit.Sharded() or dtkit.TensorParallel()"
            )
        return names

    def _measure_layer_costs(self, model: nn.Module, batch: Any, loss_fn: Loss, device: torch.device) -> LayerCosts:
        """Return the costs of the layers and of the code around them, including the loss."""
        inputs, target = loss_fn.split_batch(batch)
        if self.balance_by == "parameters":
            return layer_costs.count_by_layer(model, inputs)
        inputs, target = inputs.replace_values(to_device(inputs.values, device)), to_device(target, device)
        return layer_costs.measure_seconds(
            model, inputs, device, lambda output: loss_fn.evaluate_output(output, target).loss
        )

    def _cut_by_cost(self, names: tuple[str, ...], costs: LayerCosts) -> StageCut:
        """Return the cut by `split`, or one with the fastest slowest stage and balanced ranks."""
        starts = self._find_split_points(names)
        if starts is None:
            starts = balance_stages(costs.per_layer, self.pipeline_schedule.stages)
            starts = even_out_ranks(costs.per_layer, starts, self.pipeline_schedule.stage_ranks)
        return StageCut(names, costs, starts, self.balance_by)

    def _find_split_points(self, names: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the first layers of the stages by `split`, or None without."""
        return None if self.split is None else find_named_starts(self.split, names, self.pipeline_schedule.stages)


def _drop_values(value: Any) -> Any:
    """Return tensors that have rows without values."""
    return map_tensors(value, lambda t: t.new_empty(len(t), 0) if t.dim() else t)


def _copy_to_cpu(value: Any) -> Any:
    """Return a copy of a state dict's entry; a module's extra state may be any object."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

"""Pipeline parallelism: the model in stages, one after the other on different ranks, fed with micro-batches.

torch's pipelining does the work (GPipe: Huang et al., NeurIPS 2019; 1F1B: Narayanan et al., SOSP 2019; interleaved:
Narayanan et al., SC 2021; zero bubble: Qi et al., ICLR 2024). What it asks for, and what follows here:

*Shapes never change.* Its receive buffers have the shape of the first micro-batch, and a larger one would end the
process. So every step has the same number of micro-batches of one size; where a batch leaves a rest, micro-batches are
filled up with copies of their first row, which the loss leaves out. That is exact for any batch, and for fewer samples
than micro-batches, where each row's output depends on that row alone. Batch normalisation mixes rows: in a micro-batch
that is filled up it sees the copies, too; one without a sample leaves its statistics as they were. The shapes at the
borders between stages are found by forward passes before the first step.

*Only own parts are kept.* A rank cuts the whole model where it is held, on the host, and copies its own stages to its
device: nothing else of the model ever gets there, but for rank 0's, which times the layers there one by one.

*Only the last stage knows the loss*, so its rank alone reports one. The norm of gradients is added up over stages.

*The order is a table* (:mod:`dtkit.schedules.schedule`), of torch's own making or of the user's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtkit.engine.data.sources import to_device
from dtkit.mesh import Mesh
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.schedules.schedule import Schedule
from dtkit.strategies.base import (
    Strategy,
    Worker,
    WorkerContext,
)
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.loss import split_batch
from dtkit.strategies.options import check_choice, check_count, check_names, check_positive
from dtkit.strategies.pipeline import cut as splitting
from dtkit.strategies.pipeline import layer_costs
from dtkit.strategies.pipeline.stage import StageIO, infer_stage_io
from dtkit.strategies.pipeline.trace import (
    StageModulePair,
    check_tied_weights,
    copy_pair_to_device,
    preload_exporter,
    split_model,
    to_model_name,
)
from dtkit.strategies.pipeline.worker import PipelineWorker, require_tensor_inputs
from dtkit.strategies.replicated import copy_to_cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.loss import Loss


@dataclasses.dataclass(frozen=True, repr=False)
class Pipeline(Strategy):
    """The model is cut into stages that work at the same time, each on another micro-batch.

    Parameters
    ----------
    stages
        Ranks that a model is cut over.
    micro_batches
        Parts that a replica's samples of a step come in. The more, the less of the time is idle. A table of your own
        says how many, and they may be left out.
    schedule
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS" or "ZBVZeroBubble". The last four
        give each rank two parts of the model. Or a table of your own: a :class:`dtkit.Schedule`, or what makes one, as
        in ``["F0 F1 B0 B1", "F0 B0 F1 B1"]``, a row for each rank.
    replicas
        Copies of the whole pipeline, each with its part of every batch.
    split
        Names of the layers at which the second and later parts begin. Without, a chain of layers is cut so that the
        slowest part is as fast as possible.
    by
        What makes a layer heavy where dtkit cuts: its measured "time", or its "parameters".
    clip_grad_norm
        Largest norm of the whole gradient, over all stages.

    """

    stages: int
    micro_batches: int = 0
    schedule: str | Schedule | Sequence[Any] = "1F1B"
    replicas: int = 1
    split: Sequence[str] | None = None
    balance_by: str = "time"
    clip_grad_norm: float | None = None

    shards_model = True

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_count("stages", self.stages)
        self._normalize_schedule()
        check_count("micro_batches", self.micro_batches)
        check_count("replicas", self.replicas)
        check_positive("clip_grad_norm", self.clip_grad_norm)
        check_choice("by", self.balance_by, ("time", "parameters"))
        assert (
            self.pipeline_schedule.ranks == self.stages
        )  # a named schedule is made here first, and says what it can't do
        object.__setattr__(self, "split", check_names("split", self.split))

    def _normalize_schedule(self) -> None:
        """Make a user's table of what was given as one; it says how many micro-batches there are."""
        if isinstance(self.schedule, str) and len(self.schedule.split()) == 1:
            return
        table = self.schedule if isinstance(self.schedule, Schedule) else Schedule(self.schedule)
        if table.ranks != self.stages:
            raise ValueError(
                f"stages={self.stages}, and the schedule has {table.ranks} rows; it needs a row for each rank. Use "
                f"stages={table.ranks}, or write {self.stages} rows"
            )
        if self.micro_batches not in (0, table.micro_batches):
            raise ValueError(
                f"micro_batches={self.micro_batches}, and the schedule has {table.micro_batches}. Leave micro_batches "
                "out, or write a schedule for as many"
            )
        object.__setattr__(self, "schedule", table)
        object.__setattr__(self, "micro_batches", table.micro_batches)

    @functools.cached_property
    def pipeline_schedule(self) -> Schedule:  # type: ignore[override]  # told by `schedule`
        """What each rank does in which order."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        assert isinstance(self.schedule, str)
        return Schedule.from_name(self.schedule, self.stages, self.micro_batches)

    @property
    def num_micro_batches(self) -> int:
        """`micro_batches`."""
        return self.micro_batches

    def build_mesh(self, world_size: int) -> Mesh:
        """Replicas of pipelines; the stages of one are ranks next to each other."""
        return Mesh({"dp": self.replicas, "pp": self.stages}).check(world_size, dp="replicas", pp="stages")

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """As the model would be cut now, or as if in equal stages where its layers are not known.

        The schedule is played through: what it takes, and how many micro-batches' activations a rank holds meanwhile.
        Activations are taken as equal in all stages.
        """
        rank, stages = profile.rank % self.stages, self.pipeline_schedule.stages
        rows = math.ceil(profile.rows * self.stages / self.micro_batches)  # of one micro-batch
        seconds, numbers, outputs = self._estimate_stage_shares(profile.layer_chain)
        played = self.pipeline_schedule.simulate(
            profile.forward_s.predict(rows), profile.backward_s.predict(rows), seconds
        )
        part = sum(numbers[place] for place in self.pipeline_schedule.get_stages(rank))
        gradients = round(profile.gradients * part)
        kept = profile.activations.intercept + profile.activations.slope * rows * played.peak_micro_batches[rank]
        buffers = round(self._estimate_buffer_bytes(rank, outputs) * rows * self.micro_batches)
        return Cost(
            parameters=round(profile.parameters * part),
            gradients=gradients,
            optimizer_state=round(profile.optimizer_state * part),
            activations=round(kept / stages) + buffers + min(gradients, self._estimate_temporary_gradients(profile)),
            temporaries=round(profile.update_temporaries * part) + (gradients if self.replicas > 1 else 0) + buffers,
            overhead=round(profile.overhead.predict(rows)),
            sent_bytes=compute_ring_bytes(gradients, self.replicas)
            + self._estimate_sent_bytes(rank, outputs) * rows * self.micro_batches,
            compute_s=played.makespan + profile.update_s * part,
            exposed_communication_s=benchmark.estimate_all_reduce_s(gradients) if self.replicas > 1 else 0.0,
        )

    def _estimate_stage_shares(
        self, layers: splitting.LayerChain | None
    ) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """(each stage's share of the time, of the parameters, bytes of one row that it hands on) as far as is known."""
        count = self.pipeline_schedule.stages
        if layers is None:
            return (1 / count,) * count, (1 / count,) * count, (0.0,) * count
        alike = splitting.LayerCosts((1.0,) * len(layers.names))
        by = layers.parameter_counts if self.balance_by == "parameters" else layers.seconds or alike
        cut = self._cut_by_cost(layers.names, by)
        outputs = layers.output_bytes or (0.0,) * len(layers.names)
        handed = [outputs[places[-1]] for places in cut.stages[:-1]]
        return (
            cut.compute_stage_shares(layers.seconds or alike),
            cut.compute_stage_shares(layers.parameter_counts),
            (*handed, 0.0),
        )

    def _estimate_sent_bytes(self, rank: int, outputs: Sequence[float]) -> float:
        """Of what stages hand on and of its gradients, what this rank sends to others."""
        homes = self.pipeline_schedule.stage_ranks
        borders = [(k, k + 1) for k in range(len(homes) - 1) if homes[k] != homes[k + 1]]
        return sum(outputs[k] for k, behind in borders if rank in (homes[k], homes[behind]))

    def _estimate_buffer_bytes(self, rank: int, outputs: Sequence[float]) -> float:
        """Of what stages hand on, what this rank has buffers for: of its stages' inputs and their outputs' gradients.

        Torch has one of each for every micro-batch, from the first step on.
        """
        handed = (0.0, *outputs)
        return sum(handed[place] + handed[place + 1] for place in self.pipeline_schedule.get_stages(rank))

    def _estimate_temporary_gradients(self, profile: ModelProfile) -> int:
        """The most that comes and goes of gradients: a new one beside the sum that it is added to.

        Where weights' gradients come apart, torch holds two.
        """
        sizes = [math.prod(shape) for shape in profile.gradient_shapes]
        apart = any(action and action.kind == "W" for row in self.pipeline_schedule.rows for action in row)
        return round((1 + apart) * profile.gradients * max(sizes) / sum(sizes)) if any(sizes) else 0

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError where `model` has too few layers in a chain, or not those that the split names."""
        self._find_split_points(self._find_layer_names(model))

    def plan_for(self, model: nn.Module, *inputs: torch.Tensor) -> splitting.StageCut:
        """Where `model` is cut and what its stages cost, as a table; ValueError where it can't be.

        `inputs` are a micro-batch of what the model takes. Time is measured here and without a loss, so that engines,
        which do so for themselves, may come to other figures.
        """
        names = self._find_layer_names(model)
        if not inputs:
            raise TypeError(
                "plan_for needs what the model takes besides the model: a micro-batch, plan_for(model, X[:8])"
            )
        if self.balance_by == "time":
            costs = layer_costs.measure_seconds(model, inputs, inputs[0].device)
        else:
            costs = layer_costs.count_by_layer(model, inputs)
        return self._cut_by_cost(names, costs)

    def preload(self) -> None:
        """What a first trace loads."""
        preload_exporter()

    def setup(self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext) -> Worker:
        """This rank's stages. Alone, the whole model in one process."""
        if context.group is None:
            whole = DataParallel(accumulate=self.micro_batches, clip_grad_norm=self.clip_grad_norm)
            return whole.setup(copy.deepcopy(model), loss_fn, optimizer, context)
        if loss_fn.loss_fn is None:
            raise ValueError(
                "a pipeline needs loss=, a function of (output, target): a step= of your own runs the model by itself, "
                "and here no rank has all of it"
            )
        return PipelineWorker(self, *self._place_stages(model, loss_fn, context), loss_fn, optimizer, context)

    def _place_stages(
        self, model: nn.Module, loss_fn: Loss, context: WorkerContext
    ) -> tuple[splitting.StageCut, dict[int, StageModulePair], StageIO, dict[str, Any]]:
        """(the cut, this rank's parts by place, tensors at the borders, entries of the state dict that no part has).

        The model is cut where it is held, on the host: a device is given its own parts and nothing else.
        """
        assert context.make_sample_batch is not None
        assert context.group is not None
        batch = context.make_sample_batch(-(-context.max_local_samples // self.micro_batches))
        inputs = require_tensor_inputs(split_batch(batch)[0])
        cut = self._choose_cut(model, batch, loss_fn, context)
        parts = split_model(model, cut, inputs, context.device)
        check_tied_weights(model, parts)
        held = {to_model_name(name) for part in parts for name in part.module.state_dict()}
        rest = {name: copy_to_cpu(value) for name, value in model.state_dict().items() if name not in held}
        places = self.pipeline_schedule.get_stages(context.mesh.get_coordinates(context.group.rank)["pp"])
        mine = {place: copy_pair_to_device(parts[place], model, context.device) for place in places}
        homes = [context.mesh.get_rank(pp=home) for home in self.pipeline_schedule.stage_ranks]
        return cut, mine, infer_stage_io(mine, homes, to_device(inputs, context.device), context.group), rest

    def _choose_cut(self, model: nn.Module, batch: Any, loss_fn: Loss, context: WorkerContext) -> splitting.StageCut:
        """Where to cut: as named, or by rank 0's costs, so that all ranks cut alike."""
        names = self._find_layer_names(model)
        if (starts := self._find_split_points(names)) is not None:
            return splitting.StageCut(
                names, layer_costs.count_by_layer(model, split_batch(batch)[0]), starts, "parameters"
            )
        assert context.group is not None
        costs = torch.zeros(len(names) + 2, dtype=torch.float64)
        if context.group.rank == 0:
            found = self._measure_layer_costs(model, batch, loss_fn, context.device)
            costs += torch.tensor([found.before_layers, *found.layers, found.after_layers], dtype=torch.float64)
        before, *layers, after = context.group.all_reduce(costs).tolist()
        return self._cut_by_cost(names, splitting.LayerCosts(tuple(layers), before, after))

    def _find_layer_names(self, model: nn.Module) -> tuple[str, ...]:
        """The names of the layers at which `model` may be cut; ValueError where there are too few."""
        names = tuple(name for name, _ in splitting.find_layer_chain(model))
        if len(names) < self.pipeline_schedule.stages:
            raise ValueError(
                f"{type(model).__name__} has {len(names)} layers in a chain ({', '.join(names) or 'none'}), too few "
                f"for {self.pipeline_schedule.stages} stages. What can be cut is an nn.Sequential, or a model with an "
                "nn.ModuleList of blocks; use fewer stages, or strategy=dtkit.Sharded() or dtkit.TensorParallel()"
            )
        return names

    def _measure_layer_costs(
        self, model: nn.Module, batch: Any, loss_fn: Loss, device: torch.device
    ) -> splitting.LayerCosts:
        """What the layers of a model cost, and what runs around them; the loss is a part of that."""
        inputs, target = split_batch(batch)
        if self.balance_by == "parameters":
            return layer_costs.count_by_layer(model, inputs)
        inputs, target = to_device((inputs, target), device)
        return layer_costs.measure_seconds(
            model, inputs, device, lambda output: loss_fn.evaluate_output(output, target).loss
        )

    def _cut_by_cost(self, names: tuple[str, ...], costs: splitting.LayerCosts) -> splitting.StageCut:
        """The cut as named; else the one with the fastest slowest stage, and of these one that loads ranks alike."""
        starts = self._find_split_points(names)
        if starts is None:
            starts = splitting.balance_stages(costs.per_layer, self.pipeline_schedule.stages)
            starts = splitting.even_out_ranks(costs.per_layer, starts, self.pipeline_schedule.stage_ranks)
        return splitting.StageCut(names, costs, starts, self.balance_by)

    def _find_split_points(self, names: tuple[str, ...]) -> tuple[int, ...] | None:
        """Where the user wants parts to begin; None where dtkit is to choose."""
        return (
            None
            if self.split is None
            else splitting.find_named_starts(self.split, names, self.pipeline_schedule.stages)
        )

















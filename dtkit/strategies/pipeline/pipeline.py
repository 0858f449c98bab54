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

import contextlib
import copy
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from dtkit.engine.data.sources import map_tensors, to_device
from dtkit.engine.observe.phase_timer import BETWEEN_PHASES
from dtkit.engine.observe.stage_probe import PipelineProbe
from dtkit.mesh import Mesh
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.schedules.schedule import Schedule
from dtkit.strategies import gradients
from dtkit.strategies.base import (
    EvalFunction,
    StepResult,
    Strategy,
    Worker,
    WorkerContext,
    make_optimizer,
    split_state_dict,
)
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.loss import LOSS_IS_WEIGHTED_SUM, split_batch
from dtkit.strategies.options import check_choice, check_count, check_names, check_positive
from dtkit.strategies.pipeline import cut as splitting
from dtkit.strategies.pipeline import layer_costs
from dtkit.strategies.pipeline.stage import (
    StageIO,
    StageModulePair,
    StageRunner,
    copy_pair_to_device,
    infer_stage_io,
    named_tensors,
    preload_exporter,
    split_model,
    to_model_name,
)
from dtkit.strategies.replicated import LossAccumulator, compute_checksum, copy_to_cpu, module_eval_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.loss import Loss
    from dtkit.types import Fingerprint


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
    clip_norm
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
        check_positive("clip_norm", self.clip_grad_norm)
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
        return _PipelineWorker(self, *self._place_stages(model, loss_fn, context), loss_fn, optimizer, context)

    def _place_stages(
        self, model: nn.Module, loss_fn: Loss, context: WorkerContext
    ) -> tuple[splitting.StageCut, dict[int, StageModulePair], StageIO, dict[str, Any]]:
        """(the cut, this rank's parts by place, tensors at the borders, entries of the state dict that no part has).

        The model is cut where it is held, on the host: a device is given its own parts and nothing else.
        """
        assert context.make_sample_batch is not None
        assert context.group is not None
        batch = context.make_sample_batch(-(-context.max_local_samples // self.micro_batches))
        inputs = _require_tensors(split_batch(batch)[0])
        cut = self._choose_cut(model, batch, loss_fn, context)
        parts = split_model(model, cut, inputs, context.device)
        _check_tied_weights(model, parts)
        held = {to_model_name(name) for part in parts for name in part.module.state_dict()}
        rest = {name: copy_to_cpu(value) for name, value in model.state_dict().items() if name not in held}
        places = self.pipeline_schedule.get_stages(context.mesh.coordinates(context.group.rank)["pp"])
        mine = {place: copy_pair_to_device(parts[place], model, context.device) for place in places}
        homes = [context.mesh.rank(pp=home) for home in self.pipeline_schedule.stage_ranks]
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


class _PipelineWorker(Worker):
    """One rank's stages."""

    forward_is_collective = True

    def __init__(
        self,
        strategy: Pipeline,
        cut: splitting.StageCut,
        stage_modules: dict[int, StageModulePair],
        stage_io: StageIO,
        unstaged_entries: dict[str, Any],
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> None:
        self._strategy, self._loss_fn, self._context = strategy, loss_fn, context
        self.placement = cut
        self._phases, self._unstaged_entries = context.phases, unstaged_entries
        self._coordinates = context.mesh.coordinates(_get_rank(context))
        self.model = nn.ModuleList(part.module for part in stage_modules.values())
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self._parameters:  # an optimiser wants one: this never gets a gradient, and is no part of the model
            self.model.register_parameter("nothing", nn.Parameter(torch.zeros((), device=context.device)))
        self.optimizer = make_optimizer(optimizer, self.model)
        self._loss_accumulator = LossAccumulator(1)
        self._loss_form: int | None = None
        self._stages = StageRunner(strategy.pipeline_schedule, stage_modules, stage_io, self._compute_loss)
        assert context.group is not None
        self.set_process_group(context.group)

    def set_process_group(self, group: Group) -> None:
        """Stages hold their group: make them anew, over the same parameters."""
        self._group = group
        self._loss_form = None  # of a step that was broken off, some ranks may know it and others not
        self._device_mesh = group.device_mesh(self._context.mesh, self._context.device)
        self._stages.set_process_group(self._device_mesh.get_group("pp"), self._context.device, self._phases, group)

    def visit_state(self, visitor: StateVisitor) -> None:
        """This rank's stages, under the whole model's names; each replica has batch statistics of its own."""
        named: dict[str, torch.Tensor] = {}
        for module in self.model.children():
            named |= dict(module.named_parameters(remove_duplicate=False))
        visitor.visit_tensors("model", named)
        if self._parameters:
            visitor.visit_optimizer("optimizer", self.optimizer, named)
        for module in self.model.children():
            buffers, extra = split_state_dict(module)
            visitor.per_replica("model", buffers, None)
            visitor.visit_extra_state(module, extra)
        visitor.visit_tensors(
            "model", {name: t for name, t in self._unstaged_entries.items() if isinstance(t, torch.Tensor)}
        )

    # -- a step -----------------------------------------------------------------------------------------------

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """All micro-batches through all stages, then one update."""
        scope = probe if isinstance(probe, PipelineProbe) else None
        for p in self._parameters:
            p.grad = None  # filled with zeros instead, malloc would keep fewer gaps, and steps take 6 % longer
        self._loss_accumulator = LossAccumulator(sum(counts))
        if batches:  # a replica without samples has nothing to run, and all of its ranks know
            filled = self._pad_micro_batches(batches)
            self._phases.enter(BETWEEN_PHASES)
            with contextlib.nullcontext() if scope is None else scope.observe_stages(self._stages.torch_stages):
                inputs, targets = [x for x, _, _ in filled], [(target, count) for _, target, count in filled]
                self._stages.run_schedule(inputs, targets, [k for k, (_, _, count) in enumerate(filled) if not count])
        if scope is not None:
            scope.compare_gradient_sums()
        self._phases.enter("sync")
        self._all_reduce_over_replicas()
        self._divide_by_weight()
        norm = self._compute_grad_norm()
        if scope is not None:
            self._report_loss(scope, norm)
        self._phases.enter("update")
        finite = math.isfinite(norm)
        if finite:
            if (factor := gradients.compute_clip_factor(norm, self._strategy.clip_grad_norm)) < 1:
                gradients.scale_(self._list_gradients(), factor)
            self.optimizer.step()
            if scope is not None:
                scope.record_update(float(self.optimizer.param_groups[0]["lr"]))
        return StepResult(
            self._loss_accumulator.mean_loss,
            self._loss_accumulator.loss_weight,
            finite,
            norm,
            () if finite else self._stages.find_nonfinite(),
        )

    def make_step_probe(self, **position: int) -> StepProbe:
        """What looks at the borders of this rank's stages."""
        return PipelineProbe({place: part.module for place, part in self._stages.stage_modules.items()}, **position)

    def _report_loss(self, probe: PipelineProbe, norm: float) -> None:
        """The loss, which the last stage alone knows, and what the update is about to do."""
        probe.record_loss(
            self._loss_accumulator.mean_loss if self._stages.has_last_stage else None,
            float(self._loss_accumulator.loss_weight),
            0.0,
        )
        if self._strategy.clip_grad_norm is not None:
            probe.record_clipping(gradients.compute_clip_factor(norm, self._strategy.clip_grad_norm))

    def _pad_micro_batches(self, batches: Sequence[tuple[int, Any]]) -> list[tuple[tuple[Any, ...], Any, int]]:
        """(inputs, target, rows that count) of every micro-batch, each of full size."""
        rows, found = self._micro_batch_size, []
        for k in range(self._strategy.micro_batches):
            count, batch = batches[k] if k < len(batches) else (0, batches[0][1])
            inputs, target = split_batch(
                batch if count == rows else _select_rows(batch, self._make_padding_index(count, rows))
            )
            found.append((_require_tensors(inputs), target, count))
        return found

    @property
    def _micro_batch_size(self) -> int:
        """Of each micro-batch, those included that fill it up."""
        return int(self._stages.training_io[0][0].shape[0])

    def _make_padding_index(self, count: int, rows: int) -> torch.Tensor:
        """An index of `rows` rows of a batch of fewer: the first one again where there is none."""
        index = torch.arange(rows, device=self._context.device)
        index[max(count, 1) :] = 0
        return index

    def _compute_loss(self, output: Any, target_and_count: tuple[Any, int]) -> torch.Tensor:
        """A micro-batch's part of the global mean (or of the sum), to differentiate; its filling left out."""
        target, count = target_and_count
        if not count:
            first: torch.Tensor = tree_leaves(output)[0]
            return first.sum() * 0  # keeps every rank's backward in step
        if count < self._micro_batch_size:
            _check_batch_dim(output, self._micro_batch_size)
            output, target = _truncate_rows(output, count), _truncate_rows(target, count)
        forecast = self._loss_fn.evaluate_output(output, target)
        return self._loss_accumulator.add(forecast.loss, forecast.loss_weight, count)

    def _all_reduce_over_replicas(self) -> None:
        """Gradients of all replicas' samples, in one flat all-reduce among the ranks with the same stages."""
        if self._strategy.replicas == 1 or not self._parameters:
            return
        mates = self._device_mesh.get_group("dp")
        own = [p.grad for p in self._parameters]
        found = gradients.all_reduce_flat(self._parameters, own, lambda flat: self._group.all_reduce(flat, mates))
        for p, gradient in zip(self._parameters, found, strict=True):
            p.grad = gradient

    def _divide_by_weight(self) -> None:
        """A sum's gradients, made into those of the weighted mean: the last stages know the weights."""
        if self._loss_form is None:
            self._loss_form = gradients.agree_on_loss_form(self._loss_accumulator.loss_form, self._group)
        if self._loss_form == LOSS_IS_WEIGHTED_SUM:
            own = torch.as_tensor(self._loss_accumulator.loss_weight, dtype=torch.float64).to(
                self._context.device, copy=True
            )
            gradients.scale_(self._list_gradients(), gradients.compute_weight_factor(self._group.all_reduce(own)))

    def _compute_grad_norm(self) -> float:
        """Of the gradient of the whole model: its square is added up over the stages."""
        norm = self._compute_norm_over_stages(self._list_gradients())
        # It may have overflowed although every gradient is finite; all ranks of a pipeline have the same norm.
        return (
            norm
            if math.isfinite(norm)
            else self._compute_norm_over_stages([g.double() for g in self._list_gradients()])
        )

    def _compute_norm_over_stages(self, local_gradients: list[torch.Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        total += gradients.sum_squares(local_gradients).sum() if local_gradients else 0.0
        return math.sqrt(float(self._group.all_reduce(total, self._device_mesh.get_group("pp"))))

    def _list_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def compute_fingerprint(self) -> Fingerprint:
        """A checksum of this rank's stages, to be equal in all replicas."""
        part = self._strategy.model_shard_id(self._group.world_size, self._group.rank)
        return {part: compute_checksum(self._parameters)}

    # -- the whole model --------------------------------------------------------------------------------------

    def state_dict_parts(self) -> dict[str, Any]:
        """The entries of this rank's stages, from the first replica; rank 0 adds what no stage has."""
        if self._coordinates["dp"]:
            return {}
        found = {name: copy_to_cpu(v) for module in self.model.children() for name, v in module.state_dict().items()}
        return {**self._unstaged_entries, **found} if self._coordinates["pp"] == 0 else found

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """Micro-batch after micro-batch through all stages."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for part in self._stages.stage_modules.values():
                stack.enter_context(module_eval_mode(part.evaluation.module))
            yield self._evaluate_batch

    def _evaluate_batch(self, batch: Any) -> Any:
        inputs, target = split_batch(batch)
        count, rows, outputs = len(inputs[0]), self._micro_batch_size, []
        for start in range(0, count, rows):
            index = torch.arange(start, start + rows, device=self._context.device).clamp_(max=count - 1)
            outputs.append(self._stages.run_forward(_require_tensors(_select_rows(inputs, index))))
        if not self._stages.has_last_stage:
            return None
        return self._loss_fn.evaluate_output(
            outputs[0] if count == rows else _concat_outputs(outputs, rows, count), target
        )


def _get_rank(context: WorkerContext) -> int:
    assert context.group is not None
    return context.group.rank


def _select_rows(batch: Any, index: torch.Tensor) -> Any:
    return map_tensors(batch, lambda t: t.index_select(0, index))


def _require_tensors(inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    wrong = [type(x).__name__ for x in inputs if not isinstance(x, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"the model's inputs include {', '.join(wrong)}; stages are fed with tensors. Give arrays, or a Dataset "
            "whose samples are tuples of tensors"
        )
    return tuple(inputs)


def _truncate_rows(value: Any, count: int) -> Any:
    return tree_map(lambda t: t[:count] if isinstance(t, torch.Tensor) else t, value)


def _concat_outputs(outputs: Sequence[Any], rows: int, count: int) -> Any:
    """The output for `count` samples, of that of micro-batches of `rows`."""
    for output in outputs:
        _check_batch_dim(output, rows)
    return tree_map(lambda *parts: torch.cat(parts)[:count], *outputs)


def _check_batch_dim(output: Any, rows: int) -> None:
    """Raise ValueError where an output can't be cut: where rows of it are not those of samples."""
    wrong = [tuple(t.shape) for t in tree_leaves(output) if t.shape[:1] != (rows,)]
    if wrong:
        raise ValueError(
            f"the model returned a tensor of shape {wrong[0]} for {rows} samples. A pipeline cuts the output where a "
            "micro-batch is filled up, and joins it in an evaluation: for that, it must have one row for each sample. "
            "Return such an output (and reshape it in the loss), or train with a batch_size that replicas * "
            "micro_batches divides, on data that batch_size divides"
        )


def _check_tied_weights(model: nn.Module, parts: Sequence[StageModulePair]) -> None:
    """A parameter in two stages would be two parameters, each trained on its own."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for tied in names.values():
        found = {
            (name, place) for place, part in enumerate(parts) for name in named_tensors(part.module) if name in tied
        }
        if len({place for _, place in found}) > 1:
            where = ", ".join(f"{name} (stage {place})" for name, place in sorted(found))
            raise ValueError(
                f"{where} are one parameter (tied weights), and stages are on different ranks. Cut the model so that "
                "they are in one stage, untie them, or use strategy=dtkit.Sharded()"
            )

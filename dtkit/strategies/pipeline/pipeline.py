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

from dtkit.engine.data.sources import on_tensors, to_device
from dtkit.engine.observe.phase_timer import BETWEEN
from dtkit.engine.observe.stage_probe import StageScope
from dtkit.mesh import Mesh
from dtkit.planning.cost_model import Cost, ring_bytes
from dtkit.schedules.schedule import Schedule
from dtkit.strategies import gradients
from dtkit.strategies.base import Forward, Outcome, Setting, Strategy, Worker, entries, make_optimizer
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.loss import PAIR, split
from dtkit.strategies.options import check_choice, check_count, check_names, check_positive
from dtkit.strategies.pipeline import cut as splitting
from dtkit.strategies.pipeline import layer_costs
from dtkit.strategies.pipeline.stage import (
    Borders,
    Part,
    Stages,
    borders,
    in_model,
    load_exporter,
    moved,
    parts_of,
    tensors,
)
from dtkit.strategies.replicated import Tally, bits, evaluating, kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.step_probe import Microscope
    from dtkit.engine.state.capture import Archive
    from dtkit.planning.cost_model import Benchmark, Facts
    from dtkit.strategies.loss import Objective
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
    by: str = "time"
    clip_norm: float | None = None

    partial = True

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_count("stages", self.stages)
        self._take_table()
        check_count("micro_batches", self.micro_batches)
        check_count("replicas", self.replicas)
        check_positive("clip_norm", self.clip_norm)
        check_choice("by", self.by, ("time", "parameters"))
        assert self.table.ranks == self.stages  # a named schedule is made here first, and says what it can't do
        object.__setattr__(self, "split", check_names("split", self.split))

    def _take_table(self) -> None:
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
    def table(self) -> Schedule:  # type: ignore[override]  # told by `schedule`
        """What each rank does in which order."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        assert isinstance(self.schedule, str)
        return Schedule.named(self.schedule, self.stages, self.micro_batches)

    @property
    def parts(self) -> int:
        """`micro_batches`."""
        return self.micro_batches

    def mesh(self, world_size: int) -> Mesh:
        """Replicas of pipelines; the stages of one are ranks next to each other."""
        return Mesh({"dp": self.replicas, "pp": self.stages}).check(world_size, dp="replicas", pp="stages")

    def cost(self, facts: Facts, benchmark: Benchmark) -> Cost:
        """As the model would be cut now, or as if in equal stages where its layers are not known.

        The schedule is played through: what it takes, and how many micro-batches' activations a rank holds meanwhile.
        Activations are taken as equal in all stages.
        """
        rank, stages = facts.rank % self.stages, self.table.stages
        rows = math.ceil(facts.rows * self.stages / self.micro_batches)  # of one micro-batch
        seconds, numbers, outputs = self._foreseen(facts.layers)
        played = self.table.simulate(facts.forward_s.at(rows), facts.backward_s.at(rows), seconds)
        part = sum(numbers[place] for place in self.table.places(rank))
        gradients = round(facts.gradients * part)
        kept = facts.activations.fixed + facts.activations.per_row * rows * played.held[rank]
        buffers = round(self._received(rank, outputs) * rows * self.micro_batches)
        return Cost(
            parameters=round(facts.parameters * part),
            gradients=gradients,
            state=round(facts.state * part),
            activations=round(kept / stages) + buffers + min(gradients, self._passing(facts)),
            temporaries=round(facts.update * part) + (gradients if self.replicas > 1 else 0) + buffers,
            overhead=round(facts.overhead.at(rows)),
            sent_bytes=ring_bytes(gradients, self.replicas) + self._crossing(rank, outputs) * rows * self.micro_batches,
            compute_s=played.makespan + facts.update_s * part,
            exposed_s=benchmark.all_reduce_s(gradients) if self.replicas > 1 else 0.0,
        )

    def _foreseen(self, layers: splitting.Layers | None) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """(each stage's share of the time, of the parameters, bytes of one row that it hands on) as far as is known."""
        count = self.table.stages
        if layers is None:
            return (1 / count,) * count, (1 / count,) * count, (0.0,) * count
        alike = splitting.Costs((1.0,) * len(layers.names))
        by = layers.numbers if self.by == "parameters" else layers.seconds or alike
        cut = self._cut_by(layers.names, by)
        outputs = layers.outputs or (0.0,) * len(layers.names)
        handed = [outputs[places[-1]] for places in cut.stages[:-1]]
        return cut.shares(layers.seconds or alike), cut.shares(layers.numbers), (*handed, 0.0)

    def _crossing(self, rank: int, outputs: Sequence[float]) -> float:
        """Of what stages hand on and of its gradients, what this rank sends to others."""
        homes = self.table.homes
        borders = [(k, k + 1) for k in range(len(homes) - 1) if homes[k] != homes[k + 1]]
        return sum(outputs[k] for k, behind in borders if rank in (homes[k], homes[behind]))

    def _received(self, rank: int, outputs: Sequence[float]) -> float:
        """Of what stages hand on, what this rank has buffers for: of its stages' inputs and their outputs' gradients.

        Torch has one of each for every micro-batch, from the first step on.
        """
        handed = (0.0, *outputs)
        return sum(handed[place] + handed[place + 1] for place in self.table.places(rank))

    def _passing(self, facts: Facts) -> int:
        """The most that comes and goes of gradients: a new one beside the sum that it is added to.

        Where weights' gradients come apart, torch holds two.
        """
        sizes = [math.prod(shape) for shape in facts.shapes]
        apart = any(action and action.kind == "W" for row in self.table.rows for action in row)
        return round((1 + apart) * facts.gradients * max(sizes) / sum(sizes)) if any(sizes) else 0

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError where `model` has too few layers in a chain, or not those that the split names."""
        self._starts(self._layers(model))

    def plan_for(self, model: nn.Module, *inputs: torch.Tensor) -> splitting.Cut:
        """Where `model` is cut and what its stages cost, as a table; ValueError where it can't be.

        `inputs` are a micro-batch of what the model takes. Time is measured here and without a loss, so that engines,
        which do so for themselves, may come to other figures.
        """
        names = self._layers(model)
        if not inputs:
            raise TypeError(
                "plan_for needs what the model takes besides the model: a micro-batch, plan_for(model, X[:8])"
            )
        if self.by == "time":
            costs = layer_costs.by_time(model, inputs, inputs[0].device)
        else:
            costs = layer_costs.by_parameters(model, inputs)
        return self._cut_by(names, costs)

    def load(self) -> None:
        """What a first trace loads."""
        load_exporter()

    def setup(self, model: nn.Module, objective: Objective, optimizer: Callable[..., Any], setting: Setting) -> Worker:
        """This rank's stages. Alone, the whole model in one process."""
        if setting.group is None:
            whole = DataParallel(accumulate=self.micro_batches, clip_norm=self.clip_norm)
            return whole.setup(copy.deepcopy(model), objective, optimizer, setting)
        if objective.loss is None:
            raise ValueError(
                "a pipeline needs loss=, a function of (output, target): a step= of your own runs the model by itself, "
                "and here no rank has all of it"
            )
        return _Piped(self, *self._place(model, objective, setting), objective, optimizer, setting)

    def _place(
        self, model: nn.Module, objective: Objective, setting: Setting
    ) -> tuple[splitting.Cut, dict[int, Part], Borders, dict[str, Any]]:
        """(the cut, this rank's parts by place, tensors at the borders, entries of the state dict that no part has).

        The model is cut where it is held, on the host: a device is given its own parts and nothing else.
        """
        assert setting.sample is not None
        assert setting.group is not None
        batch = setting.sample(-(-setting.largest // self.micro_batches))
        inputs = _tensors(split(batch)[0])
        cut = self._cut(model, batch, objective, setting)
        parts = parts_of(model, cut, inputs, setting.device)
        _check_shared(model, parts)
        held = {in_model(name) for part in parts for name in part.module.state_dict()}
        rest = {name: kept(value) for name, value in model.state_dict().items() if name not in held}
        places = self.table.places(setting.mesh.coordinates(setting.group.rank)["pp"])
        mine = {place: moved(parts[place], model, setting.device) for place in places}
        homes = [setting.mesh.rank(pp=home) for home in self.table.homes]
        return cut, mine, borders(mine, homes, to_device(inputs, setting.device), setting.group), rest

    def _cut(self, model: nn.Module, batch: Any, objective: Objective, setting: Setting) -> splitting.Cut:
        """Where to cut: as named, or by rank 0's costs, so that all ranks cut alike."""
        names = self._layers(model)
        if (starts := self._starts(names)) is not None:
            return splitting.Cut(names, layer_costs.by_parameters(model, split(batch)[0]), starts, "parameters")
        assert setting.group is not None
        costs = torch.zeros(len(names) + 2, dtype=torch.float64)
        if setting.group.rank == 0:
            found = self._costs(model, batch, objective, setting.device)
            costs += torch.tensor([found.before, *found.layers, found.after], dtype=torch.float64)
        before, *layers, after = setting.group.all_reduce(costs).tolist()
        return self._cut_by(names, splitting.Costs(tuple(layers), before, after))

    def _layers(self, model: nn.Module) -> tuple[str, ...]:
        """The names of the layers at which `model` may be cut; ValueError where there are too few."""
        names = tuple(name for name, _ in splitting.chain(model))
        if len(names) < self.table.stages:
            raise ValueError(
                f"{type(model).__name__} has {len(names)} layers in a chain ({', '.join(names) or 'none'}), too few "
                f"for {self.table.stages} stages. What can be cut is an nn.Sequential, or a model with an "
                "nn.ModuleList of blocks; use fewer stages, or strategy=dtkit.Sharded() or dtkit.TensorParallel()"
            )
        return names

    def _costs(self, model: nn.Module, batch: Any, objective: Objective, device: torch.device) -> splitting.Costs:
        """What the layers of a model cost, and what runs around them; the loss is a part of that."""
        inputs, target = split(batch)
        if self.by == "parameters":
            return layer_costs.by_parameters(model, inputs)
        inputs, target = to_device((inputs, target), device)
        return layer_costs.by_time(model, inputs, device, lambda output: objective.judge(output, target).loss)

    def _cut_by(self, names: tuple[str, ...], costs: splitting.Costs) -> splitting.Cut:
        """The cut as named; else the one with the fastest slowest stage, and of these one that loads ranks alike."""
        starts = self._starts(names)
        if starts is None:
            starts = splitting.balanced(costs.joined, self.table.stages)
            starts = splitting.evened(costs.joined, starts, self.table.homes)
        return splitting.Cut(names, costs, starts, self.by)

    def _starts(self, names: tuple[str, ...]) -> tuple[int, ...] | None:
        """Where the user wants parts to begin; None where dtkit is to choose."""
        return None if self.split is None else splitting.named(self.split, names, self.table.stages)


class _Piped(Worker):
    """One rank's stages."""

    collective = True

    def __init__(
        self,
        strategy: Pipeline,
        cut: splitting.Cut,
        parts: dict[int, Part],
        found: Borders,
        rest: dict[str, Any],
        objective: Objective,
        optimizer: Callable[..., Any],
        setting: Setting,
    ) -> None:
        self._strategy, self._objective, self._setting = strategy, objective, setting
        self.placement = cut
        self._phases, self._rest = setting.phases, rest
        self._place = setting.mesh.coordinates(_rank(setting))
        self.model = nn.ModuleList(part.module for part in parts.values())
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self._parameters:  # an optimiser wants one: this never gets a gradient, and is no part of the model
            self.model.register_parameter("nothing", nn.Parameter(torch.zeros((), device=setting.device)))
        self.optimizer = make_optimizer(optimizer, self.model)
        self._tally = Tally(1)
        self._form: int | None = None
        self._stages = Stages(strategy.table, parts, found, self._loss)
        assert setting.group is not None
        self.regroup(setting.group)

    def regroup(self, group: Group) -> None:
        """Stages hold their group: make them anew, over the same parameters."""
        self._group = group
        self._form = None  # of a step that was broken off, some ranks may know it and others not
        self._grid = group.grid(self._setting.mesh, self._setting.device)
        self._stages.join(self._grid.get_group("pp"), self._setting.device, self._phases, group)

    def exchange(self, archive: Archive) -> None:
        """This rank's stages, under the whole model's names; each replica has batch statistics of its own."""
        named: dict[str, torch.Tensor] = {}
        for module in self.model.children():
            named |= dict(module.named_parameters(remove_duplicate=False))
        archive.tensors("model", named)
        if self._parameters:
            archive.optimizer("optimizer", self.optimizer, named)
        for module in self.model.children():
            buffers, extra = entries(module)
            archive.differing("model", buffers, None)
            archive.plain_entries(module, extra)
        archive.tensors("model", {name: t for name, t in self._rest.items() if isinstance(t, torch.Tensor)})

    # -- a step -----------------------------------------------------------------------------------------------

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], microscope: Microscope | None = None
    ) -> Outcome:
        """All micro-batches through all stages, then one update."""
        scope = microscope if isinstance(microscope, StageScope) else None
        for p in self._parameters:
            p.grad = None  # filled with zeros instead, malloc would keep fewer gaps, and steps take 6 % longer
        self._tally = Tally(sum(counts))
        if batches:  # a replica without samples has nothing to run, and all of its ranks know
            filled = self._filled(batches)
            self._phases.enter(BETWEEN)
            with contextlib.nullcontext() if scope is None else scope.over(self._stages.working):
                inputs, targets = [x for x, _, _ in filled], [(target, count) for _, target, count in filled]
                self._stages.run(inputs, targets, [k for k, (_, _, count) in enumerate(filled) if not count])
        if scope is not None:
            scope.summed()
        self._phases.enter("sync")
        self._sum_over_replicas()
        self._divide()
        norm = self._norm()
        if scope is not None:
            self._show(scope, norm)
        self._phases.enter("update")
        finite = math.isfinite(norm)
        if finite:
            if (factor := gradients.clipping(norm, self._strategy.clip_norm)) < 1:
                gradients.scale(self._gradients(), factor)
            self.optimizer.step()
            if scope is not None:
                scope.updated(float(self.optimizer.param_groups[0]["lr"]))
        return Outcome(self._tally.mean, self._tally.weight, finite, norm, () if finite else self._stages.astray())

    def microscope(self, **where: int) -> Microscope:
        """What looks at the borders of this rank's stages."""
        return StageScope({place: part.module for place, part in self._stages.parts.items()}, **where)

    def _show(self, scope: StageScope, norm: float) -> None:
        """The loss, which the last stage alone knows, and what the update is about to do."""
        scope.loss(self._tally.mean if self._stages.speaks else None, float(self._tally.weight), 0.0)
        if self._strategy.clip_norm is not None:
            scope.clipped(gradients.clipping(norm, self._strategy.clip_norm))

    def _filled(self, batches: Sequence[tuple[int, Any]]) -> list[tuple[tuple[Any, ...], Any, int]]:
        """(inputs, target, rows that count) of every micro-batch, each of full size."""
        rows, found = self._rows, []
        for k in range(self._strategy.micro_batches):
            count, batch = batches[k] if k < len(batches) else (0, batches[0][1])
            inputs, target = split(batch if count == rows else _rows(batch, self._padding(count, rows)))
            found.append((_tensors(inputs), target, count))
        return found

    @property
    def _rows(self) -> int:
        """Of each micro-batch, those included that fill it up."""
        return int(self._stages.shapes[0][0].shape[0])

    def _padding(self, count: int, rows: int) -> torch.Tensor:
        """An index of `rows` rows of a batch of fewer: the first one again where there is none."""
        index = torch.arange(rows, device=self._setting.device)
        index[max(count, 1) :] = 0
        return index

    def _loss(self, output: Any, given: tuple[Any, int]) -> torch.Tensor:
        """A micro-batch's part of the global mean (or of the sum), to differentiate; its filling left out."""
        target, count = given
        if not count:
            first: torch.Tensor = tree_leaves(output)[0]
            return first.sum() * 0  # keeps every rank's backward in step
        if count < self._rows:
            _check_rows(output, self._rows)
            output, target = _cut_rows(output, count), _cut_rows(target, count)
        forecast = self._objective.judge(output, target)
        return self._tally.add(forecast.loss, forecast.weight, count)

    def _sum_over_replicas(self) -> None:
        """Gradients of all replicas' samples, in one flat all-reduce among the ranks with the same stages."""
        if self._strategy.replicas == 1 or not self._parameters:
            return
        mates = self._grid.get_group("dp")
        own = [p.grad for p in self._parameters]
        found = gradients.summed(self._parameters, own, lambda flat: self._group.all_reduce(flat, mates))
        for p, gradient in zip(self._parameters, found, strict=True):
            p.grad = gradient

    def _divide(self) -> None:
        """A sum's gradients, made into those of the weighted mean: the last stages know the weights."""
        if self._form is None:
            self._form = gradients.agree_on_form(self._tally.form, self._group)
        if self._form == PAIR:
            own = torch.as_tensor(self._tally.weight, dtype=torch.float64).to(self._setting.device, copy=True)
            gradients.scale(self._gradients(), gradients.per_weight(self._group.all_reduce(own)))

    def _norm(self) -> float:
        """Of the gradient of the whole model: its square is added up over the stages."""
        norm = self._over_stages(self._gradients())
        # It may have overflowed although every gradient is finite; all ranks of a pipeline have the same norm.
        return norm if math.isfinite(norm) else self._over_stages([g.double() for g in self._gradients()])

    def _over_stages(self, own: list[torch.Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._setting.device)
        total += gradients.squares(own).sum() if own else 0.0
        return math.sqrt(float(self._group.all_reduce(total, self._grid.get_group("pp"))))

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def fingerprint(self) -> Fingerprint:
        """A checksum of this rank's stages, to be equal in all replicas."""
        part = self._strategy.part_of(self._group.world_size, self._group.rank)
        return {part: bits(self._parameters)}

    # -- the whole model --------------------------------------------------------------------------------------

    def pieces(self) -> dict[str, Any]:
        """The entries of this rank's stages, from the first replica; rank 0 adds what no stage has."""
        if self._place["dp"]:
            return {}
        found = {name: kept(v) for module in self.model.children() for name, v in module.state_dict().items()}
        return {**self._rest, **found} if self._place["pp"] == 0 else found

    @contextlib.contextmanager
    def forwards(self) -> Iterator[Forward]:
        """Micro-batch after micro-batch through all stages."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for part in self._stages.parts.values():
                stack.enter_context(evaluating(part.evaluation.module))
            yield self._forecast

    def _forecast(self, batch: Any) -> Any:
        inputs, target = split(batch)
        count, rows, outputs = len(inputs[0]), self._rows, []
        for start in range(0, count, rows):
            index = torch.arange(start, start + rows, device=self._setting.device).clamp_(max=count - 1)
            outputs.append(self._stages.forecast(_tensors(_rows(inputs, index))))
        if not self._stages.speaks:
            return None
        return self._objective.judge(outputs[0] if count == rows else _joined(outputs, rows, count), target)


def _rank(setting: Setting) -> int:
    assert setting.group is not None
    return setting.group.rank


def _rows(batch: Any, index: torch.Tensor) -> Any:
    return on_tensors(batch, lambda t: t.index_select(0, index))


def _tensors(inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    wrong = [type(x).__name__ for x in inputs if not isinstance(x, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"the model's inputs include {', '.join(wrong)}; stages are fed with tensors. Give arrays, or a Dataset "
            "whose samples are tuples of tensors"
        )
    return tuple(inputs)


def _cut_rows(value: Any, count: int) -> Any:
    return tree_map(lambda t: t[:count] if isinstance(t, torch.Tensor) else t, value)


def _joined(outputs: Sequence[Any], rows: int, count: int) -> Any:
    """The output for `count` samples, of that of micro-batches of `rows`."""
    for output in outputs:
        _check_rows(output, rows)
    return tree_map(lambda *parts: torch.cat(parts)[:count], *outputs)


def _check_rows(output: Any, rows: int) -> None:
    """Raise ValueError where an output can't be cut: where rows of it are not those of samples."""
    wrong = [tuple(t.shape) for t in tree_leaves(output) if t.shape[:1] != (rows,)]
    if wrong:
        raise ValueError(
            f"the model returned a tensor of shape {wrong[0]} for {rows} samples. A pipeline cuts the output where a "
            "micro-batch is filled up, and joins it in an evaluation: for that, it must have one row for each sample. "
            "Return such an output (and reshape it in the loss), or train with a batch_size that replicas * "
            "micro_batches divides, on data that batch_size divides"
        )


def _check_shared(model: nn.Module, parts: Sequence[Part]) -> None:
    """A parameter in two stages would be two parameters, each trained on its own."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for tied in names.values():
        found = {(name, place) for place, part in enumerate(parts) for name in tensors(part.module) if name in tied}
        if len({place for _, place in found}) > 1:
            where = ", ".join(f"{name} (stage {place})" for name, place in sorted(found))
            raise ValueError(
                f"{where} are one parameter (tied weights), and stages are on different ranks. Cut the model so that "
                "they are in one stage, untie them, or use strategy=dtkit.Sharded()"
            )

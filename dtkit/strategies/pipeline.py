"""Pipeline parallelism: the model in stages, one after the other on different ranks, fed with micro-batches.

torch's pipelining does the work (GPipe: Huang et al., NeurIPS 2019; 1F1B: Narayanan et al., SOSP 2019; interleaved:
Narayanan et al., SC 2021; zero bubble: Qi et al., ICLR 2024). What it asks for, and what follows here:

*Shapes never change.* Its receive buffers have the shape of the first micro-batch, and a larger one would end the
process. So every step has the same number of micro-batches of one size; where a batch leaves a rest, micro-batches are
filled up with copies of their first row, which the loss leaves out. That is exact for any batch, and for fewer samples
than micro-batches. The shapes at the borders between stages are found by one forward pass, which every rank makes
before anything is sent.

*Only own parts are kept.* A rank looks at the whole model once, to cut it, and copies its own stages.

*Only the last stage knows the loss*, so its rank alone reports one. The norm of gradients is added up over stages.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from dtkit.engine.sources import on_tensors, to_device
from dtkit.mesh import Mesh
from dtkit.plan import Cost, ring_bytes
from dtkit.strategies import splitting
from dtkit.strategies.base import Forward, Outcome, Setting, Strategy, Worker, make_optimizer
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.objective import MEAN, PAIR, split
from dtkit.strategies.options import check_choice, check_count, check_positive
from dtkit.strategies.replica import Tally, evaluating, kept
from dtkit.strategies.stages import SCHEDULES, Part, Stages, borders, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm import Group
    from dtkit.engine.explain import Microscope
    from dtkit.plan import Benchmark, Facts
    from dtkit.strategies.objective import Objective


@dataclasses.dataclass(frozen=True, repr=False)
class Pipeline(Strategy):
    """The model is cut into stages that work at the same time, each on another micro-batch.

    Parameters
    ----------
    stages
        Ranks that a model is cut over.
    micro_batches
        Parts that a replica's samples of a step come in. The more, the less of the time is idle.
    schedule
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS" or "ZBVZeroBubble". The last four
        give each rank two parts of the model.
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
    micro_batches: int
    schedule: str = "1F1B"
    replicas: int = 1
    split: Sequence[str] | None = None
    by: str = "time"
    clip_norm: float | None = None

    explains = False
    partial = True

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        for name in ("stages", "micro_batches", "replicas"):
            check_count(name, getattr(self, name))
        check_positive("clip_norm", self.clip_norm)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("by", self.by, ("time", "parameters"))
        if self.schedule != "GPipe" and self.micro_batches < self.stages:
            raise ValueError(
                f"micro_batches={self.micro_batches} for {self.stages} stages: {self.schedule} needs at least as many "
                f"micro-batches as stages. Use micro_batches={self.stages} or more, or schedule='GPipe'"
            )
        if self.split is not None:
            object.__setattr__(self, "split", tuple(self.split))

    @property
    def parts_per_rank(self) -> int:  # type: ignore[override]  # told by the schedule
        """One, or two with schedules that go through the ranks twice."""
        return SCHEDULES[self.schedule].per_rank

    @property
    def parts(self) -> int:
        """`micro_batches`."""
        return self.micro_batches

    def mesh(self, world_size: int) -> Mesh:
        """Replicas of pipelines; the stages of one are ranks next to each other."""
        return Mesh({"dp": self.replicas, "pp": self.stages}).check(world_size)

    def cost(self, facts: Facts, benchmark: Benchmark) -> Cost:
        """Equal stages are assumed; what crosses the borders is not known before the model is cut, and not counted.

        1F1B and its relatives keep at most as many micro-batches as there are stages, GPipe keeps all of them.
        """
        p, m = self.stages, self.micro_batches
        rows = facts.rows * p / m  # of one micro-batch
        held = m if self.schedule == "GPipe" else min(p, m)
        gradients = facts.gradients // p
        return Cost(
            parameters=facts.parameters // p,
            gradients=gradients,
            state=facts.state // p,
            activations=round(held * facts.activations.at(rows) / p),
            temporaries=facts.update // p + (gradients if self.replicas > 1 else 0),
            overhead=round(facts.overhead.at(rows)),
            sent_bytes=ring_bytes(gradients, self.replicas),
            compute_s=(m + p - 1) * (facts.forward_s.at(rows) + facts.backward_s.at(rows)) / p + facts.update_s / p,
            exposed_s=benchmark.all_reduce_s(gradients) if self.replicas > 1 else 0.0,
        )

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
        return _Piped(self, *self._place(model, setting), objective, optimizer, setting)

    def _place(self, model: nn.Module, setting: Setting) -> tuple[dict[int, Part], list[Any], dict[str, Any]]:
        """(this rank's parts by place, tensors at the borders, entries of the state dict that no part has)."""
        assert setting.sample is not None
        kind = SCHEDULES[self.schedule]
        rows = -(-setting.largest // self.micro_batches)
        inputs = _tensors(split(to_device(setting.sample(rows), setting.device))[0])
        model = model.to(setting.device)
        cut = self._cut(model, inputs, setting)
        parts = parts_of(model, cut, inputs)
        _check_shared(model, parts)
        shapes = borders(parts, inputs)
        held = {name for part in parts for name in part.module.state_dict()}
        rest = {name: kept(value) for name, value in model.state_dict().items() if name not in held}
        mine = kind.places(setting.mesh.coordinates(_rank(setting))["pp"], self.stages)
        return {place: _own(parts[place]) for place in mine}, shapes, rest

    def _cut(self, model: nn.Module, inputs: Sequence[Any], setting: Setting) -> splitting.Cut:
        """Where to cut: as named, or by rank 0's costs, so that all ranks cut alike."""
        count = self.stages * SCHEDULES[self.schedule].per_rank
        layers = splitting.chain(model)
        names = tuple(name for name, _ in layers)
        if len(layers) < count:
            raise ValueError(
                f"{type(model).__name__} has {len(layers)} layers in a chain ({', '.join(names) or 'none'}), too few "
                f"for {count} stages. What can be cut is an nn.Sequential, or a model with an nn.ModuleList of blocks; "
                "use fewer stages, or strategy=dtkit.Sharded() or dtkit.TensorParallel()"
            )
        if self.split is not None:
            return splitting.Cut(names, (1.0,) * len(names), splitting.named(self.split, names, count))
        assert setting.group is not None
        costs = torch.zeros(len(layers), dtype=torch.float64)
        if setting.group.rank == 0:
            found = (
                splitting.time_costs(model, layers, inputs) if self.by == "time" else splitting.parameter_costs(layers)
            )
            costs += torch.tensor(found, dtype=torch.float64)
        setting.group.all_reduce(costs)
        found = costs.tolist()
        return splitting.Cut(names, tuple(found), splitting.balanced(found, count))


class _Piped(Worker):
    """One rank's stages."""

    collective = True

    def __init__(
        self,
        strategy: Pipeline,
        parts: dict[int, Part],
        shapes: list[Any],
        rest: dict[str, Any],
        objective: Objective,
        optimizer: Callable[..., Any],
        setting: Setting,
    ) -> None:
        self._strategy, self._objective, self._setting = strategy, objective, setting
        self._phases, self._rest = setting.phases, rest
        self._place = setting.mesh.coordinates(_rank(setting))
        self.model = nn.ModuleList(part.module for part in parts.values())
        self.optimizer = make_optimizer(optimizer, self.model)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._tally = Tally(1)
        self._form: int | None = None
        self._stages = Stages(SCHEDULES[strategy.schedule], parts, shapes, strategy.micro_batches, self._loss)
        assert setting.group is not None
        self.regroup(setting.group)

    def regroup(self, group: Group) -> None:
        """Stages hold their group: make them anew, over the same parameters."""
        self._group = group
        self._grid = group.grid(self._setting.mesh, self._setting.device)
        self._stages.join(self._grid.get_group("pp"), self._setting.device, self._phases)

    # -- a step -----------------------------------------------------------------------------------------------

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], _microscope: Microscope | None = None
    ) -> Outcome:
        """All micro-batches through all stages, then one update."""
        for p in self._parameters:
            p.grad = None
        self._tally = Tally(sum(counts))
        if batches:  # a replica without samples has nothing to run, and all of its ranks know
            filled = self._filled(batches)
            self._phases.enter("recv")
            self._stages.run([inputs for inputs, _, _ in filled], [(target, count) for _, target, count in filled])
        self._phases.enter("sync")
        self._sum_over_replicas()
        self._divide()
        norm = self._norm()
        self._phases.enter("update")
        finite = math.isfinite(norm)
        if finite:
            self._clip(norm)
            self.optimizer.step()
        return Outcome(self._tally.mean, self._tally.weight, finite, norm)

    def _filled(self, batches: Sequence[tuple[int, Any]]) -> list[tuple[tuple[Any, ...], Any, int]]:
        """(inputs, target, rows that count) of every micro-batch, each of full size."""
        rows = self._stages.shapes[0][0].shape[0]
        found = []
        for k in range(self._strategy.micro_batches):
            count, batch = batches[k] if k < len(batches) else (0, batches[0][1])
            index = torch.arange(rows, device=self._setting.device)
            index[max(count, 1) :] = 0
            inputs, target = split(_rows(batch, index))
            found.append((_tensors(inputs), target, count))
        return found

    def _loss(self, output: Any, given: tuple[Any, int]) -> torch.Tensor:
        """A micro-batch's part of the global mean (or of the sum), to differentiate; its filling left out."""
        self._phases.enter("forward")
        target, count = given
        if not count:
            first: torch.Tensor = output[0] if isinstance(output, tuple) else output
            return first.sum() * 0  # keeps every rank's backward in step
        forecast = self._objective.judge(_cut_rows(output, count), _cut_rows(target, count))
        part = self._tally.add(forecast.loss, forecast.weight, count)
        self._phases.enter("recv")
        return part

    def _sum_over_replicas(self) -> None:
        """Gradients of all replicas' samples, in one flat all-reduce among the ranks with the same stages."""
        if self._strategy.replicas == 1:
            return
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=self._grid.get_group("dp"))
        sizes = [p.numel() for p in self._parameters]
        for p, gradient in zip(self._parameters, torch.split(flat, sizes), strict=True):
            p.grad = gradient.view_as(p).to(p.dtype)

    def _divide(self) -> None:
        """A sum's gradients, made into those of the weighted mean: the last stages know the weights."""
        if self._form is None:
            votes = torch.tensor([self._tally.form == MEAN, self._tally.form == PAIR], dtype=torch.float32)
            self._form = MEAN if self._group.all_reduce(votes)[0] else PAIR
        if self._form == PAIR:
            own = torch.as_tensor(self._tally.weight, dtype=torch.float64).to(self._setting.device, copy=True)
            total = self._group.all_reduce(own).clamp_(min=torch.finfo(own.dtype).tiny)
            self._scale(float((1 / total).nan_to_num()))

    def _norm(self) -> float:
        """Of the gradient of the whole model: its square is added up over the stages."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        squares = [float(torch.linalg.vector_norm(g.double())) ** 2 for g in gradients]
        total = torch.tensor([sum(squares)], dtype=torch.float64, device=self._setting.device)
        dist.all_reduce(total, group=self._grid.get_group("pp"))
        return math.sqrt(float(total))

    def _clip(self, norm: float) -> None:
        limit = self._strategy.clip_norm
        if limit is not None and norm > limit:
            self._scale(limit / (norm + 1e-6))

    def _scale(self, factor: float) -> None:
        for p in self._parameters:
            if p.grad is not None:
                p.grad.mul_(factor)

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
                stack.enter_context(evaluating(part.forecast))
            yield self._forecast

    def _forecast(self, batch: Any) -> Any:
        rows = self._stages.shapes[0][0].shape[0]
        inputs, target = split(batch)
        count = len(inputs[0])
        outputs = []
        for start in range(0, count, rows):
            index = torch.arange(start, start + rows, device=self._setting.device).clamp_(max=count - 1)
            outputs.append(self._stages.forecast(_tensors(_rows(inputs, index))))
        if not self._stages.speaks:
            return None
        return self._objective.judge(torch.cat(outputs)[:count], target)


def _rank(setting: Setting) -> int:
    assert setting.group is not None
    return setting.group.rank


def _own(part: Part) -> Part:
    """A copy of a part, both of its modules over the same new parameters."""
    memo: dict[int, Any] = {}
    module = copy.deepcopy(part.module, memo)
    return Part(module, module if part.forecast is part.module else copy.deepcopy(part.forecast, memo))


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
    return on_tensors(value, lambda t: t[:count])


def _check_shared(model: nn.Module, parts: Sequence[Part]) -> None:
    """A parameter in two stages would be two parameters, each trained on its own; so would be one in a trace twice."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for tied in names.values():
        found = {
            (name, place, p.data_ptr())
            for place, part in enumerate(parts)
            for name, p in part.module.named_parameters(remove_duplicate=False)
            if name in tied
        }
        if len({place for _, place, _ in found}) > 1 or len({pointer for _, _, pointer in found}) > 1:
            where = ", ".join(f"{name} (stage {place})" for name, place, _ in sorted(found))
            raise ValueError(
                f"{where} are one parameter (tied weights), and stages are on different ranks. Cut the model so that "
                "they are in one stage, untie them, or use strategy=dtkit.Sharded()"
            )

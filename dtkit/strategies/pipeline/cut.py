"""Where to cut a model into stages: a chain of layers in contiguous parts, the slowest part made as fast as possible.

A model can be cut where one of its layers begins. The layers of an ``nn.Sequential`` are its children; of any other
model, the blocks of the ``nn.ModuleList`` or inner ``nn.Sequential`` with most parameters. What runs before the first
layer (embeddings) goes to the first stage, and what runs after the last (a head, the loss) to the last one: what that
costs is counted there. What a layer costs (:mod:`dtkit.strategies.pipeline.layer_costs`) is its measured time or its
parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from torch import nn

from dtkit._util import formatting
from dtkit.planning.layer_chain import LayerCosts

if TYPE_CHECKING:
    from collections.abc import Sequence






@dataclasses.dataclass(frozen=True, repr=False)
class StageCut:
    """A model's layers, what each costs, and where stages begin. Shows itself as a table."""

    layers: tuple[str, ...]
    costs: LayerCosts
    stage_starts: tuple[int, ...]
    """For each stage, the place of its first layer."""
    cost_unit: str = "time"
    """What the costs are: "time" or "parameters"."""

    @property
    def stages(self) -> list[range]:
        """The places of each stage's layers."""
        return [range(a, b) for a, b in itertools.pairwise([*self.stage_starts, len(self.layers)])]

    def compute_stage_cost(self, stage: int) -> float:
        """What a stage costs: its layers, and in the first and the last one what runs around them."""
        joined = self.costs.per_layer
        return sum(joined[k] for k in self.stages[stage])

    def compute_stage_shares(self, costs: LayerCosts | None = None) -> tuple[float, ...]:
        """Each stage's part of all that the model costs, or of other costs of the same layers."""
        cut = self if costs is None else dataclasses.replace(self, costs=costs)
        found = [cut.compute_stage_cost(k) for k in range(len(self.stage_starts))]
        total = sum(found)
        return tuple(cost / total if total else 1 / len(found) for cost in found)

    def __repr__(self) -> str:
        return _format_cut(self)


def _format_cut(cut: StageCut) -> str:
    """A row for each stage: its layers, what they cost, and what runs before and after all of them."""
    told = formatting.format_duration if cut.cost_unit == "time" else lambda count: f"{count:,.0f}"
    head = ("stage", "from", "to", "layers", "before them", "after them", "in all")
    rows, last = [], len(cut.stages) - 1
    for k, places in enumerate(cut.stages):
        around = [told(cut.costs.before_layers) if k == 0 else "", told(cut.costs.after_layers) if k == last else ""]
        own = told(sum(cut.costs.layers[place] for place in places))
        rows.append(
            (str(k), cut.layers[places[0]], cut.layers[places[-1]], own, *around, told(cut.compute_stage_cost(k)))
        )
    title = f"{formatting.format_count(len(cut.layers), 'layer')} in {formatting.format_count(last + 1, 'stage')}, by {cut.cost_unit}"
    return "\n".join([title, *formatting.format_columns([head, *rows], left_aligned=(1, 2))])


def find_layer_chain(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers at which `model` may be cut, by name and in order; none where it has no chain."""
    if isinstance(model, nn.Sequential):
        return list(zip(model._modules, model, strict=True))  # noqa: SLF001 - named_children leaves out what comes twice
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    if not lists:
        return []
    name, blocks = max(lists, key=lambda found: (count_parameters(found[1]), len(found[1])))
    return [(f"{name}.{k}", block) for k, block in blocks.named_children()]


def count_parameters(module: nn.Module) -> int:
    """In a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def balance_stages(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Where `parts` contiguous parts begin whose largest cost is as small as possible. By dynamic programming."""
    n = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [0.0] + [math.inf] * n  # of the first k layers in so many parts
    choice: list[list[int]] = []
    for _ in range(num_stages):
        found, begin = [math.inf] * (n + 1), [0] * (n + 1)
        for k in range(1, n + 1):
            for j in range(k):
                worst = max(best[j], total[k] - total[j])
                if worst < found[k]:
                    found[k], begin[k] = worst, j
        best = found
        choice.append(begin)
    starts, end = [], n
    for begin in reversed(choice):
        end = begin[end]
        starts.append(end)
    return tuple(reversed(starts))


def even_out_ranks(costs: Sequence[float], starts: Sequence[int], stage_ranks: Sequence[int]) -> tuple[int, ...]:
    """The same parts with their ranks' sums made more alike, where some ranks have several: `stage_ranks` says which.

    Layers next to a border move over it as long as that helps, and the largest part grows no larger: a rank that has
    the first stage and the last one, with all that runs around the layers, is given fewer of these.
    """
    ends = [*starts, len(costs)]
    parts = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    largest = max(parts)
    ranks = [
        sum(cost for cost, home in zip(parts, stage_ranks, strict=True) if home == rank)
        for rank in range(max(stage_ranks) + 1)
    ]
    moved = True
    while moved:  # each move makes the sum of squares over ranks smaller
        moved = False
        for k, step in itertools.product(range(1, len(starts)), (-1, 1)):
            giving, taking = (k - 1, k) if step < 0 else (k, k - 1)
            if ends[giving + 1] - ends[giving] < 2:
                continue
            cost = costs[ends[k] - (step < 0)]
            if parts[taking] + cost <= largest and ranks[stage_ranks[giving]] - ranks[stage_ranks[taking]] > cost * (
                1 + 1e-9
            ):
                ends[k] += step
                parts[giving], parts[taking] = parts[giving] - cost, parts[taking] + cost
                ranks[stage_ranks[giving]] -= cost
                ranks[stage_ranks[taking]] += cost
                moved = True
    return tuple(ends[:-1])


def find_named_starts(names: Sequence[str], layers: Sequence[str], stages: int) -> tuple[int, ...]:
    """The starts that a user gave: names of the layers at which the second and later stages begin."""
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise ValueError(
            f"split has {', '.join(map(repr, unknown))}, which begins no layer of this model; it can be cut at "
            f"{', '.join(layers[1:])}"
        )
    places = [layers.index(name) for name in names]
    if len(places) != stages - 1 or sorted(set(places)) != places or 0 in places:
        raise ValueError(
            f"split={list(names)} gives {len(places) + 1} stages of this model, and {stages} are wanted: name, in "
            f"order, the {stages - 1} layers at which the second and later stages begin, from {', '.join(layers[1:])}"
        )
    return (0, *places)

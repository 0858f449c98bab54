"""Cutting a chain of layers into contiguous stages, so that the slowest stage is as fast as possible.

A model can be cut where one of its layers begins. The layers of an ``nn.Sequential`` are its children. In any other
model, they are the blocks of the ``nn.ModuleList`` or inner ``nn.Sequential`` with the most parameters. Code before the
first layer (embeddings) belongs to the first stage. Code after the last layer (a head, the loss) belongs to the last
stage. The cost of a layer (:mod:`dtkit.strategies.pipeline.layer_costs`) is its measured time or its parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from torch import nn

from dtkit._util import formatting
from dtkit._util.torch_private import get_module_dict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.planning.layer_chain import LayerCosts


@dataclasses.dataclass(frozen=True, repr=False)
class StageCut:
    """A model's layers with their costs, and the first layer of each stage. Its `repr` is a table."""

    layers: tuple[str, ...]
    costs: LayerCosts
    stage_starts: tuple[int, ...]
    """Index of the first layer of each stage."""
    cost_unit: str = "time"
    """Unit of the costs: "time" or "parameters"."""

    @property
    def stages(self) -> list[range]:
        """Indices of each stage's layers."""
        return [range(a, b) for a, b in itertools.pairwise([*self.stage_starts, len(self.layers)])]

    def compute_stage_cost(self, stage: int) -> float:
        """Return the cost of a stage; the first and the last include the code around the layers."""
        costs = self.costs.per_layer
        return sum(costs[k] for k in self.stages[stage])

    def compute_stage_shares(self, costs: LayerCosts | None = None) -> tuple[float, ...]:
        """Return each stage's share of the model's costs, or of other costs of the same layers."""
        cut = self if costs is None else dataclasses.replace(self, costs=costs)
        stage_costs = [cut.compute_stage_cost(k) for k in range(len(self.stage_starts))]
        total = sum(stage_costs)
        return tuple(cost / total if total else 1 / len(stage_costs) for cost in stage_costs)

    def __repr__(self) -> str:
        return _format_cut(self)


def _format_cut(cut: StageCut) -> str:
    """Return a table with a row for each stage: its layers, their cost, and the costs around all layers."""
    format_cost = formatting.format_duration if cut.cost_unit == "time" else lambda count: f"{count:,.0f}"
    head = ("stage", "from", "to", "layers", "before them", "after them", "total")
    rows, last = [], len(cut.stages) - 1
    for k, stage in enumerate(cut.stages):
        before = format_cost(cut.costs.before_layers) if k == 0 else ""
        after = format_cost(cut.costs.after_layers) if k == last else ""
        layer_cost = format_cost(sum(cut.costs.layers[layer] for layer in stage))
        stage_cost = format_cost(cut.compute_stage_cost(k))
        rows.append((str(k), cut.layers[stage[0]], cut.layers[stage[-1]], layer_cost, before, after, stage_cost))
    layers = formatting.format_count(len(cut.layers), "layer")
    title = f"{layers} in {formatting.format_count(last + 1, 'stage')}, by {cut.cost_unit}"
    return "\n".join([title, *formatting.format_columns([head, *rows], left_aligned=(1, 2))])


def find_layer_chain(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers at which `model` may be cut, by name and in order; none without a chain."""
    if isinstance(model, nn.Sequential):
        return list(zip(get_module_dict(model), model, strict=True))
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    if not lists:
        return []
    name, blocks = max(lists, key=lambda named: (count_parameters(named[1]), len(named[1])))
    return [(f"{name}.{k}", block) for k, block in blocks.named_children()]


def count_parameters(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def balance_stages(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the starts of contiguous stages whose largest cost is minimal, by dynamic programming."""
    n = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [0.0] + [math.inf] * n  # the largest cost of a stage among the first k layers
    choice: list[list[int]] = []
    for _ in range(num_stages):
        largest, begin = [math.inf] * (n + 1), [0] * (n + 1)
        for k in range(1, n + 1):
            for j in range(k):
                worst = max(best[j], total[k] - total[j])
                if worst < largest[k]:
                    largest[k], begin[k] = worst, j
        best = largest
        choice.append(begin)
    starts, end = [], n
    for begin in reversed(choice):
        end = begin[end]
        starts.append(end)
    return tuple(reversed(starts))


def even_out_ranks(costs: Sequence[float], starts: Sequence[int], stage_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return stages with more equal costs per rank, if ranks have several stages.

    This moves layers over the borders between stages as long as that helps, without increasing the maximum. So a rank
    with the first and the last stage, and with the code around the layers, gets fewer layers.
    """
    ends = [*starts, len(costs)]
    parts = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    largest = max(parts)
    ranks = [
        sum(cost for cost, stage_rank in zip(parts, stage_ranks, strict=True) if stage_rank == rank)
        for rank in range(max(stage_ranks) + 1)
    ]
    has_moved = True
    while has_moved:  # ends, since each move decreases the sum of squares over ranks
        has_moved = False
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
                has_moved = True
    return tuple(ends[:-1])


def find_named_starts(names: Sequence[str], layers: Sequence[str], stages: int) -> tuple[int, ...]:
    """Return the starts by the names of the layers at which the second and later stages begin."""
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise ValueError(
            f"split names {', '.join(map(repr, unknown))}, but this model has no such layer; it can be cut at "
            f"{', '.join(layers[1:])}"
        )
    starts = [layers.index(name) for name in names]
    if len(starts) != stages - 1 or sorted(set(starts)) != starts or 0 in starts:
        raise ValueError(
            f"split={list(names)} gives {len(starts) + 1} stages of this model, but there must be {stages}. Name, in "
            f"order, the {stages - 1} layers at which the second and later stages begin, from {', '.join(layers[1:])}"
        )
    return (0, *starts)

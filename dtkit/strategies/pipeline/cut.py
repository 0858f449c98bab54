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

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Costs:
    """What each layer costs, and what runs around them: seconds, or numbers of parameters."""

    layers: tuple[float, ...]
    before: float = 0.0
    """Of what runs before the first layer."""
    after: float = 0.0
    """Of what runs after the last one."""

    @property
    def joined(self) -> list[float]:
        """By layer, with what can't be cut off from the first and the last one."""
        found = list(self.layers)
        found[0] += self.before
        found[-1] += self.after
        return found


@dataclasses.dataclass(frozen=True)
class Layers:
    """A model's chain of layers, by name, and what is known of them before it is cut."""

    names: tuple[str, ...]
    numbers: Costs
    """In their parameters."""
    seconds: Costs | None = None
    """As measured; None where no step was taken."""
    outputs: tuple[float, ...] = ()
    """Bytes that come out of each, for one row of a batch; none where that is not known."""


@dataclasses.dataclass(frozen=True, repr=False)
class Cut:
    """A model's layers, what each costs, and where stages begin. Shows itself as a table."""

    layers: tuple[str, ...]
    costs: Costs
    starts: tuple[int, ...]
    """For each stage, the place of its first layer."""
    by: str = "time"
    """What the costs are: "time" or "parameters"."""

    @property
    def stages(self) -> list[range]:
        """The places of each stage's layers."""
        return [range(a, b) for a, b in itertools.pairwise([*self.starts, len(self.layers)])]

    def cost(self, stage: int) -> float:
        """What a stage costs: its layers, and in the first and the last one what runs around them."""
        joined = self.costs.joined
        return sum(joined[k] for k in self.stages[stage])

    def shares(self, costs: Costs | None = None) -> tuple[float, ...]:
        """Each stage's part of all that the model costs, or of other costs of the same layers."""
        cut = self if costs is None else dataclasses.replace(self, costs=costs)
        found = [cut.cost(k) for k in range(len(self.starts))]
        total = sum(found)
        return tuple(cost / total if total else 1 / len(found) for cost in found)

    def __repr__(self) -> str:
        return _table(self)


def _table(cut: Cut) -> str:
    """A row for each stage: its layers, what they cost, and what runs before and after all of them."""
    told = formatting.duration if cut.by == "time" else lambda count: f"{count:,.0f}"
    head = ("stage", "from", "to", "layers", "before them", "after them", "in all")
    rows, last = [], len(cut.stages) - 1
    for k, places in enumerate(cut.stages):
        around = [told(cut.costs.before) if k == 0 else "", told(cut.costs.after) if k == last else ""]
        own = told(sum(cut.costs.layers[place] for place in places))
        rows.append((str(k), cut.layers[places[0]], cut.layers[places[-1]], own, *around, told(cut.cost(k))))
    title = f"{formatting.plural(len(cut.layers), 'layer')} in {formatting.plural(last + 1, 'stage')}, by {cut.by}"
    return "\n".join([title, *formatting.columns([head, *rows], left=(1, 2))])


def chain(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers at which `model` may be cut, by name and in order; none where it has no chain."""
    if isinstance(model, nn.Sequential):
        return list(zip(model._modules, model, strict=True))  # noqa: SLF001 - named_children leaves out what comes twice
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    if not lists:
        return []
    name, blocks = max(lists, key=lambda found: (numbers(found[1]), len(found[1])))
    return [(f"{name}.{k}", block) for k, block in blocks.named_children()]


def numbers(module: nn.Module) -> int:
    """In a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def balanced(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where `parts` contiguous parts begin whose largest cost is as small as possible. By dynamic programming."""
    n = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [0.0] + [math.inf] * n  # of the first k layers in so many parts
    choice: list[list[int]] = []
    for _ in range(parts):
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


def evened(costs: Sequence[float], starts: Sequence[int], homes: Sequence[int]) -> tuple[int, ...]:
    """The same parts with their ranks' sums made more alike, where some ranks have several: `homes` says which.

    Layers next to a border move over it as long as that helps, and the largest part grows no larger: a rank that has
    the first stage and the last one, with all that runs around the layers, is given fewer of these.
    """
    ends = [*starts, len(costs)]
    parts = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    largest = max(parts)
    ranks = [
        sum(cost for cost, home in zip(parts, homes, strict=True) if home == rank) for rank in range(max(homes) + 1)
    ]
    moved = True
    while moved:  # each move makes the sum of squares over ranks smaller
        moved = False
        for k, step in itertools.product(range(1, len(starts)), (-1, 1)):
            giving, taking = (k - 1, k) if step < 0 else (k, k - 1)
            if ends[giving + 1] - ends[giving] < 2:
                continue
            cost = costs[ends[k] - (step < 0)]
            if parts[taking] + cost <= largest and ranks[homes[giving]] - ranks[homes[taking]] > cost * (1 + 1e-9):
                ends[k] += step
                parts[giving], parts[taking] = parts[giving] - cost, parts[taking] + cost
                ranks[homes[giving]] -= cost
                ranks[homes[taking]] += cost
                moved = True
    return tuple(ends[:-1])


def named(names: Sequence[str], layers: Sequence[str], stages: int) -> tuple[int, ...]:
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

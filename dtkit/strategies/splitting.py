"""Where to cut a model into stages: a chain of layers in contiguous parts, the slowest part made as fast as possible.

A model can be cut where one of its layers begins. The layers of an ``nn.Sequential`` are its children; of any other
model, the blocks of the ``nn.ModuleList`` or inner ``nn.Sequential`` with most parameters, with what runs before the
first block joined to that, and what runs after the last joined to the last. The cost of a layer is its measured time,
forward and backward on one micro-batch, or its parameters.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = 3  # timings of each layer, of which the fastest counts


@dataclasses.dataclass(frozen=True)
class Cut:
    """A model's layers, what each costs, and where stages begin."""

    layers: tuple[str, ...]
    costs: tuple[float, ...]
    starts: tuple[int, ...]
    """For each stage, the place of its first layer."""

    @property
    def stages(self) -> list[range]:
        """The places of each stage's layers."""
        ends = [*self.starts[1:], len(self.layers)]
        return [range(a, b) for a, b in zip(self.starts, ends, strict=True)]

    def cost(self, stage: int) -> float:
        """What a stage's layers cost together."""
        return sum(self.costs[k] for k in self.stages[stage])


def chain(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers at which `model` may be cut, by name and in order; none where it has no chain."""
    if isinstance(model, nn.Sequential):
        return list(zip(model._modules, model, strict=True))  # noqa: SLF001 - named_children leaves out what comes twice
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    if not lists:
        return []
    name, blocks = max(lists, key=lambda found: (_size(found[1]), len(found[1])))
    return [(f"{name}.{k}", block) for k, block in blocks.named_children()]


def _size(module: nn.Module) -> int:
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


def parameter_costs(layers: Sequence[tuple[str, nn.Module]]) -> list[float]:
    """Parameters of each layer."""
    return [float(_size(layer)) for _, layer in layers]


def time_costs(model: nn.Module, layers: Sequence[tuple[str, nn.Module]], inputs: Sequence[Any]) -> list[float]:
    """Seconds of forward and backward of each layer, on what reaches it when `model` is given `inputs`."""
    reached: dict[int, tuple[Any, ...]] = {}

    def noting(place: int) -> Any:
        def hook(_module: nn.Module, given: tuple[Any, ...]) -> None:
            reached[place] = given

        return hook

    handles = [layer.register_forward_pre_hook(noting(k)) for k, (_, layer) in enumerate(layers)]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    missed = [name for k, (name, _) in enumerate(layers) if k not in reached]
    if missed:
        raise ValueError(f"{', '.join(missed)} took no part in the model's forward pass, so it is no chain of layers")
    return [_seconds(layer, reached[k]) for k, (_, layer) in enumerate(layers)]


def _seconds(layer: nn.Module, given: tuple[Any, ...]) -> float:
    own = [p for p in layer.parameters() if p.requires_grad]
    inputs = [_fresh(value) for value in given]
    wanted = own + [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        out = layer(*inputs)
        first = out[0] if isinstance(out, tuple) else out
        if wanted and isinstance(first, torch.Tensor) and first.requires_grad:
            torch.autograd.grad(first, wanted, torch.ones_like(first), allow_unused=True)
        if isinstance(first, torch.Tensor) and first.is_cuda:
            torch.cuda.synchronize(first.device)
        found.append(time.perf_counter() - begun)
    return min(found)


def _fresh(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())

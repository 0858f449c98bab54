"""What crosses the borders between stages: which values a stage is given, which of them it needs, which it hands on.

A stage sends to the next one only. So a value that is needed further on (the model's input in its last layer, a mask in
every block) passes through the stages between as it is, and its gradient comes back the same way. A stage's module is
called with its values in the order that torch's exporter chose for it, which is that of their first use.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.utils._pytree import TreeSpec


@dataclasses.dataclass(frozen=True)
class Route:
    """The names of one stage's values."""

    comes: tuple[str, ...]
    """Over the border before it."""
    takes: tuple[str, ...]
    """What its module is called with."""
    makes: tuple[str, ...]
    """What its module returns."""
    goes: tuple[str, ...]
    """Over the border behind it."""


@dataclasses.dataclass
class Piece:
    """A stage's module with its route; without one, it takes and returns just what crosses the borders."""

    module: nn.Module
    route: Route | None = None
    form: TreeSpec | None = None
    """Of what the model returns, where this is the last stage."""
    written: frozenset[int] = frozenset()
    """Which of the values that come over the border before it are written to, as nn.ReLU(inplace=True) does."""

    def __call__(self, *given: Any) -> tuple[torch.Tensor, ...]:
        """What goes over the border behind it, of what came over the one before.

        That is a leaf to autograd, and may be the very tensor that the stage before it has made: where this one writes
        to it, it gets a copy.
        """
        given = tuple(t.clone() if k in self.written else t for k, t in enumerate(given))
        if self.route is None:
            found, self.form = tree_flatten(self.module(*given))
            return _tensors(found)
        values = dict(zip(self.route.comes, given, strict=True))
        made = self.module(*(values[name] for name in self.route.takes))
        values.update(zip(self.route.makes, made if isinstance(made, (tuple, list)) else (made,), strict=True))
        return _tensors([values[name] for name in self.route.goes])

    def whole(self, found: Sequence[torch.Tensor]) -> Any:
        """What the model returns, of what came out of its last stage."""
        assert self.form is not None
        return tree_unflatten(list(found), self.form)


def _tensors(found: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    values = tuple(found)
    _check([value for value in values if not isinstance(value, torch.Tensor)])
    return values


def _check(others: Sequence[Any]) -> None:
    if others:
        names = ", ".join(type(value).__name__ for value in others)
        raise TypeError(
            f"the model (or one of its stages) returns {names} besides tensors; stages hand on tensors. Have it return "
            "tensors alone, or tuples, lists or dicts of them, or use strategy=dtkit.Sharded()"
        )


def sendable(made: Sequence[torch.Tensor], given: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What a stage made, each a tensor of its own without gaps.

    Messages are sent as they lie in memory; and torch's schedules that halve backward detach a stage's outputs in
    place, which no view allows, nor may it be done to what was given.
    """
    own = {id(tensor) for tensor in given}
    return tuple(_own(t) if t._is_view() or not t.is_contiguous() or id(t) in own else t for t in made)  # noqa: SLF001


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def routes(whole: fx.GraphModule, stages: Sequence[nn.Module]) -> list[Route]:
    """The route of each stage of a model that torch's pipelining has split: `whole` calls the stages one by one."""
    nodes = list(whole.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    inputs = tuple(node.name for node in nodes if node.op == "placeholder")
    output = next(node for node in nodes if node.op == "output")
    needed = [[a.name for a in call.args] for call in calls] + [_names(output.args[0])]
    made = [_made(call, stage) for call, stage in zip(calls, stages, strict=True)]
    borders = [inputs]
    for k in range(1, len(calls)):
        there = [*inputs, *(name for names in made[:k] for name in names)]
        later = {name for names in needed[k:] for name in names}
        borders.append(tuple(name for name in there if name in later))
    borders.append(tuple(needed[-1]))
    return [Route(borders[k], tuple(needed[k]), made[k], borders[k + 1]) for k in range(len(calls))]


def _names(returned: Any) -> list[str]:
    leaves = tree_flatten(returned)[0]
    _check([leaf for leaf in leaves if not isinstance(leaf, fx.Node)])
    return [leaf.name for leaf in leaves]


def _made(call: fx.Node, stage: Any) -> tuple[str, ...]:
    """The names of what a stage's module returns: one value, or several that are looked up by number."""
    returned = next(node for node in stage.graph.nodes if node.op == "output").args[0]
    if not isinstance(returned, (tuple, list)):
        return (call.name,)
    names = [f"{call.name}[{k}]" for k in range(len(returned))]
    for user in call.users:  # each looks one up
        place: Any = user.args[1]
        names[place] = user.name
    return tuple(names)

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
class ValueRouting:
    """The names of one stage's values."""

    received: tuple[str, ...]
    """Over the border before it."""
    module_inputs: tuple[str, ...]
    """What its module is called with."""
    module_outputs: tuple[str, ...]
    """What its module returns."""
    sent: tuple[str, ...]
    """Over the border behind it."""


@dataclasses.dataclass
class StageModule:
    """A stage's module with its route; without one, it takes and returns just what crosses the borders."""

    module: nn.Module
    routing: ValueRouting | None = None
    output_spec: TreeSpec | None = None
    """Of what the model returns, where this is the last stage."""
    mutated_inputs: frozenset[int] = frozenset()
    """Which of the values that come over the border before it are written to, as nn.ReLU(inplace=True) does."""

    def __call__(self, *given: Any) -> tuple[torch.Tensor, ...]:
        """What goes over the border behind it, of what came over the one before.

        That is a leaf to autograd, and may be the very tensor that the stage before it has made: where this one writes
        to it, it gets a copy.
        """
        given = tuple(t.clone() if k in self.mutated_inputs else t for k, t in enumerate(given))
        if self.routing is None:
            found, self.output_spec = tree_flatten(self.module(*given))
            return _require_tensors(found)
        values = dict(zip(self.routing.received, given, strict=True))
        made = self.module(*(values[name] for name in self.routing.module_inputs))
        values.update(
            zip(self.routing.module_outputs, made if isinstance(made, (tuple, list)) else (made,), strict=True)
        )
        return _require_tensors([values[name] for name in self.routing.sent])

    def unflatten_output(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What the model returns, of what came out of its last stage."""
        assert self.output_spec is not None
        return tree_unflatten(list(outputs), self.output_spec)


def _require_tensors(returned: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    values = tuple(returned)
    _refuse_non_tensors([value for value in values if not isinstance(value, torch.Tensor)])
    return values


def _refuse_non_tensors(values: Sequence[Any]) -> None:
    if values:
        names = ", ".join(type(value).__name__ for value in values)
        raise TypeError(
            f"the model (or one of its stages) returns {names} besides tensors; stages hand on tensors. Have it return "
            "tensors alone, or tuples, lists or dicts of them, or use strategy=dtkit.Sharded()"
        )


def make_sendable(outputs: Sequence[torch.Tensor], inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What a stage made, each a tensor of its own without gaps.

    Messages are sent as they lie in memory; and torch's schedules that halve backward detach a stage's outputs in
    place, which no view allows, nor may it be done to what was given.
    """
    own = {id(tensor) for tensor in inputs}
    return tuple(_clone_contiguous(t) if t._is_view() or not t.is_contiguous() or id(t) in own else t for t in outputs)  # noqa: SLF001


def _clone_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def build_routings(graph_module: fx.GraphModule, stages: Sequence[nn.Module]) -> list[ValueRouting]:
    """The route of each stage of a model that torch's pipelining has split: `whole` calls the stages one by one."""
    nodes = list(graph_module.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    inputs = tuple(node.name for node in nodes if node.op == "placeholder")
    output = next(node for node in nodes if node.op == "output")
    needed = [[a.name for a in call.args] for call in calls] + [_list_value_names(output.args[0])]
    made = [_list_output_names(call, stage) for call, stage in zip(calls, stages, strict=True)]
    borders = [inputs]
    for k in range(1, len(calls)):
        there = [*inputs, *(name for names in made[:k] for name in names)]
        later = {name for names in needed[k:] for name in names}
        borders.append(tuple(name for name in there if name in later))
    borders.append(tuple(needed[-1]))
    return [ValueRouting(borders[k], tuple(needed[k]), made[k], borders[k + 1]) for k in range(len(calls))]


def _list_value_names(returned: Any) -> list[str]:
    leaves = tree_flatten(returned)[0]
    _refuse_non_tensors([leaf for leaf in leaves if not isinstance(leaf, fx.Node)])
    return [leaf.name for leaf in leaves]


def _list_output_names(call: fx.Node, stage: Any) -> tuple[str, ...]:
    """The names of what a stage's module returns: one value, or several that are looked up by number."""
    returned = next(node for node in stage.graph.nodes if node.op == "output").args[0]
    if not isinstance(returned, (tuple, list)):
        return (call.name,)
    names = [f"{call.name}[{k}]" for k in range(len(returned))]
    for user in call.users:  # each looks one up
        place: Any = user.args[1]
        names[place] = user.name
    return tuple(names)

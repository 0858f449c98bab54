"""Values between stages: those that a stage receives, that its module takes, and that it sends on.

A stage sends to the next one only. So a value that a later stage needs, such as a mask, passes unchanged through the
stages between them. Its gradient returns the same way. A stage's module takes its values in the order of torch's
exporter, which is that of their first use.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dtkit._util.torch_private import is_view, tree_flatten, tree_unflatten
from dtkit.strategies.activation_checkpointing import run_checkpointed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from dtkit._util.torch_private import TreeSpec


@dataclasses.dataclass(frozen=True)
class ValueRouting:
    """Names of one stage's values."""

    received: tuple[str, ...]
    """Values from the previous stage."""
    module_inputs: tuple[str, ...]
    """Arguments of the stage's module."""
    module_outputs: tuple[str, ...]
    """Results of the stage's module."""
    sent: tuple[str, ...]
    """Values for the next stage."""


@dataclasses.dataclass
class StageModule:
    """A stage's module with its routing. Without a routing, it takes all received values, and returns the values to
    send.
    """

    module: nn.Module
    routing: ValueRouting | None = None
    output_spec: TreeSpec | None = None
    """Structure of the model's output, on the last stage."""
    mutated_inputs: frozenset[int] = frozenset()
    """Indices of received values that the module changes in place, as nn.ReLU(inplace=True) does."""
    recomputes: bool = False
    """Whether the module computes again in backward instead of keeping its activations."""

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the values to send, given those received.

        Received values are leaves of autograd, and may be tensors of the previous stage on the same rank. So the module
        gets copies of those that it changes.
        """
        inputs = tuple(t.clone() if k in self.mutated_inputs else t for k, t in enumerate(inputs))
        call = functools.partial(run_checkpointed, self.module) if self.recomputes else self.module
        if self.routing is None:
            outputs, self.output_spec = tree_flatten(call(*inputs))
            return _require_tensors(outputs)
        values = dict(zip(self.routing.received, inputs, strict=True))
        result = call(*(values[name] for name in self.routing.module_inputs))
        results = result if isinstance(result, (tuple, list)) else (result,)
        values.update(zip(self.routing.module_outputs, results, strict=True))
        return _require_tensors([values[name] for name in self.routing.sent])

    def unflatten_output(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the model's output, given the values of its last stage."""
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
            f"the model (or one of its stages) returns {names} besides tensors; stages send tensors only. Return "
            "only tensors, or tuples, lists or dicts of them, or use strategy=dtkit.Sharded()"
        )


def make_sendable(outputs: Sequence[torch.Tensor], inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return a stage's outputs as contiguous tensors that are neither views nor inputs.

    Messages need contiguous memory. torch's schedules with halves of backward detach outputs in place, which fails for
    views and must not happen to inputs.
    """
    input_ids = {id(tensor) for tensor in inputs}
    return tuple(_clone_contiguous(t) if _needs_clone(t) or id(t) in input_ids else t for t in outputs)


def _needs_clone(tensor: torch.Tensor) -> bool:
    return is_view(tensor) or not tensor.is_contiguous()


def _clone_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def build_routings(graph_module: fx.GraphModule, stages: Sequence[nn.Module]) -> list[ValueRouting]:
    """Return the routing of each stage of a model split by torch; `graph_module` calls the stages in order."""
    nodes = list(graph_module.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    inputs = tuple(node.name for node in nodes if node.op == "placeholder")
    output = next(node for node in nodes if node.op == "output")
    needed = [[a.name for a in call.args] for call in calls] + [_list_value_names(output.args[0])]
    outputs = [_list_output_names(call, stage) for call, stage in zip(calls, stages, strict=True)]
    borders = [inputs]
    for k in range(1, len(calls)):
        available = [*inputs, *(name for names in outputs[:k] for name in names)]
        later = {name for names in needed[k:] for name in names}
        borders.append(tuple(name for name in available if name in later))
    borders.append(tuple(needed[-1]))
    return [ValueRouting(borders[k], tuple(needed[k]), outputs[k], borders[k + 1]) for k in range(len(calls))]


def _list_value_names(returned: Any) -> list[str]:
    leaves = tree_flatten(returned)[0]
    _refuse_non_tensors([leaf for leaf in leaves if not isinstance(leaf, fx.Node)])
    return [leaf.name for leaf in leaves]


def _list_output_names(call: fx.Node, stage: Any) -> tuple[str, ...]:
    """Return the names of the values that a stage's module returns."""
    returned = next(node for node in stage.graph.nodes if node.op == "output").args[0]
    if not isinstance(returned, (tuple, list)):
        return (call.name,)
    names = [f"{call.name}[{k}]" for k in range(len(returned))]
    for user in call.users:  # each is a getitem
        index: Any = user.args[1]
        names[index] = user.name
    return tuple(names)

"""Whether torch can take a stage's backward pass in halves: first what the stage before waits for, then the weights.

For the second half torch makes groups of weights: it keeps the gradients at those nodes of the inputs' graph that a
weight's path meets first, and later goes on from there, group by group. Each of these passes frees what it ran through.
That gives every weight its gradient only where each one's path meets the inputs' graph, and where no pass runs through
what another one needs. Neither holds for all models: a weight may be used by itself (learned queries that attend to
each other, a sum of two weights), behind what is frozen, or twice with others in between.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, construct_reverse_graph, reverse_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch.autograd.graph import Node


def can_split_backward(
    outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]
) -> bool:
    """Whether backward from `outputs` can be taken in halves: to the `inputs`, and to the `weights` later."""
    roots = _get_grad_nodes(outputs)
    reverse = construct_reverse_graph(roots)
    own = [node for node in _get_grad_nodes(weights) if node in reverse or node in roots]
    groups = _build_param_groups(own, _get_grad_nodes(inputs), reverse)
    if groups is None:
        return False
    passes = [_find_nodes_between(group.intermediates, group.weights, reverse) for group in groups]
    return len(set[Any]().union(*passes)) == sum(map(len, passes))


@dataclasses.dataclass(eq=False)
class _ParamGroup:
    """Weights, and where their ways to the outputs meet the inputs'."""

    weights: set[Node]
    intermediates: set[Node]


def _build_param_groups(
    weights: Iterable[Node], inputs: list[Node], reverse_graph: dict[Node, list[Node]]
) -> list[_ParamGroup] | None:
    """As torch makes them; None where a weight has none, or torch's depend on how it goes through a set.

    It takes the nodes that a weight's ways meet one by one. Where some of them have a group and others none, or have
    different ones, groups that overlap may come of that: not with every run, since a set's order follows addresses.
    """
    closure, _ = reverse_closure(inputs, set(), reverse_graph)
    found: dict[Node, _ParamGroup] = {}
    for weight in weights:
        _, met = reverse_closure([weight], closure, reverse_graph)
        known = {found[node] for node in met if node in found}
        if not met or len(known) > 1 or (known and not met <= found.keys()):
            return None
        group = known.pop() if known else _ParamGroup(set(), met)
        group.weights.add(weight)
        found.update(dict.fromkeys(met, group))
    return list(dict.fromkeys(found.values()))


def _get_grad_nodes(tensors: Iterable[torch.Tensor]) -> list[Node]:
    """Where the gradients of those that have one come out."""
    found = (_get_grad_fn_or_grad_acc(t) for t in tensors)
    return [node for node in found if node is not None]


def _find_nodes_between(starts: set[Node], ends: set[Node], reverse_graph: dict[Node, list[Node]]) -> set[Node]:
    """The nodes on all ways from a group's `stage_starts` to the weights at its `ends`, the latter left out."""
    if len(starts) == 1:  # as of most groups: all ways up from the ends lead to it, and there's nothing to find above
        return (_find_reachable(ends, lambda node: () if node in starts else reverse_graph[node]) | starts) - ends
    return (_find_reachable(ends, reverse_graph.__getitem__) & _find_reachable(starts, _get_next_nodes)) - ends


def _get_next_nodes(node: Node) -> list[Node]:
    return [found for found, _ in node.next_functions if found is not None]


def _find_reachable(starts: Iterable[Node], get_next: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """These and all that follow."""
    found, waiting = set(starts), list(starts)
    while waiting:
        new = set(get_next(waiting.pop())) - found
        found |= new
        waiting += new
    return found

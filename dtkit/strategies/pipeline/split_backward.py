"""Whether torch can split a stage's backward pass into halves: first the inputs' gradients, then the weights'.

For the second half torch forms groups of weights. It keeps the gradients at the nodes of the inputs' graph that a
weight's path meets first. From there it continues group by group. Each of these passes frees its part of the graph. So
each weight's path must meet the inputs' graph, and no pass may use nodes that another pass needs. Some models violate
this. A weight may be used alone (learned queries, a sum of two weights), after frozen parameters, or twice around other
weights.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util.torch_private import construct_reverse_graph, get_grad_node, reverse_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch.autograd.graph import Node


def can_split_backward(
    outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]
) -> bool:
    """Return whether backward from `outputs` can run in halves: first to `inputs`, later to `weights`."""
    roots = _get_grad_nodes(outputs)
    reverse = construct_reverse_graph(roots)
    weight_nodes = [node for node in _get_grad_nodes(weights) if node in reverse or node in roots]
    groups = _build_param_groups(weight_nodes, _get_grad_nodes(inputs), reverse)
    if groups is None:
        return False
    passes = [_find_nodes_between(group.intermediates, group.weights, reverse) for group in groups]
    return len(set[Any]().union(*passes)) == sum(map(len, passes))


@dataclasses.dataclass(eq=False)
class _ParamGroup:
    """Weights, and the nodes where their paths to the outputs meet the inputs' paths."""

    weights: set[Node]
    intermediates: set[Node]


def _build_param_groups(
    weights: Iterable[Node], inputs: list[Node], reverse_graph: dict[Node, list[Node]]
) -> list[_ParamGroup] | None:
    """Return the groups as torch forms them, or None if a weight has none or torch's groups may overlap.

    torch iterates over the nodes that a weight's paths meet. If these have different groups, or some have none, its
    groups overlap depending on the order of a set, which follows addresses.
    """
    closure, _ = reverse_closure(inputs, set(), reverse_graph)
    groups: dict[Node, _ParamGroup] = {}
    for weight in weights:
        _, met = reverse_closure([weight], closure, reverse_graph)
        known = {groups[node] for node in met if node in groups}
        if not met or len(known) > 1 or (known and not met <= groups.keys()):
            return None
        group = known.pop() if known else _ParamGroup(set(), met)
        group.weights.add(weight)
        groups.update(dict.fromkeys(met, group))
    return list(dict.fromkeys(groups.values()))


def _get_grad_nodes(tensors: Iterable[torch.Tensor]) -> list[Node]:
    """Return the nodes that compute or accumulate the tensors' gradients."""
    nodes = (get_grad_node(t) for t in tensors)
    return [node for node in nodes if node is not None]


def _find_nodes_between(starts: set[Node], ends: set[Node], reverse_graph: dict[Node, list[Node]]) -> set[Node]:
    """Return the nodes on all paths from `starts` to the weights at `ends`, without the latter."""
    if len(starts) == 1:  # the common case: all paths from the ends lead to it
        return (_find_reachable(ends, lambda node: () if node in starts else reverse_graph[node]) | starts) - ends
    return (_find_reachable(ends, reverse_graph.__getitem__) & _find_reachable(starts, _get_next_nodes)) - ends


def _get_next_nodes(node: Node) -> list[Node]:
    return [successor for successor, _ in node.next_functions if successor is not None]


def _find_reachable(starts: Iterable[Node], get_next: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return these nodes and all that follow."""
    reachable, pending = set(starts), list(starts)
    while pending:
        new = set(get_next(pending.pop())) - reachable
        reachable |= new
        pending += new
    return reachable

"""Marks of the collectives within layers, during forward and backward.

torch starts such a collective and returns a tensor that waits for it at its first use. Functions of torch's module of
functional collectives start them, and another one waits. While shards compute, dtkit replaces these functions. Starting
doesn't block, so only the wait is marked. But an injected delay applies at the start, since the peers wait for that.

Sums over all ranks of one host don't need torch's collective: :meth:`Group.all_reduce` has a faster way.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit._util.torch_private import functional_collectives
from dtkit.strategies.patching import replace_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.phase_timer import PhaseTimer

_WAIT_FUNCTION = "wait_tensor"
_SUM_FUNCTION = "all_reduce"
_COLLECTIVE_FUNCTIONS = (
    _SUM_FUNCTION,
    "all_gather_single",
    "all_gather_tensor",  # its name before torch 2.13
    "reduce_scatter_single",
    "reduce_scatter_tensor",  # its name before torch 2.13
    "all_to_all_single",
    "broadcast",
)


@contextlib.contextmanager
def mark_collectives(phases: PhaseTimer, ranks: tuple[int, int] | None, group: Group | None) -> Iterator[None]:
    """Mark waits within the context as collectives among these ranks of a group (see :func:`rank_span`)."""
    functions = vars(functional_collectives)
    wrapped = {name: _wrap_collective(phases, functions[name]) for name in _COLLECTIVE_FUNCTIONS if name in functions}
    if ranks is None and group is not None:
        wrapped[_SUM_FUNCTION] = _wrap_sum(phases, group, wrapped[_SUM_FUNCTION])
    wrapped[_WAIT_FUNCTION] = _wrap_wait(phases, ranks, functions[_WAIT_FUNCTION])
    with replace_functions(functional_collectives, wrapped):
        yield


def _wrap_collective(phases: PhaseTimer, collective: Callable[..., Any]) -> Callable[..., Any]:
    def delayed(*args: Any, **kwargs: Any) -> Any:
        phases.apply_delay()
        return collective(*args, **kwargs)

    return delayed


def _wrap_sum(phases: PhaseTimer, group: Group, all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    def sum_directly(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        operation = kwargs.get("reduceOp", args[0] if args else "")
        if operation.lower() != "sum" or torch.compiler.is_compiling() or not group.can_sum_directly(tensor):
            return all_reduce(tensor, *args, **kwargs)
        phases.apply_delay()
        total = tensor.clone(memory_format=torch.contiguous_format)
        phases.begin_collective(None)
        group.all_reduce(total)
        phases.end_collective()
        return total

    return sum_directly


def _wrap_wait(phases: PhaseTimer, ranks: tuple[int, int] | None, wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def marked(tensor: Any) -> Any:
        phases.begin_collective(ranks)
        result = wait(tensor)
        phases.end_collective()
        return result

    return marked


def rank_span(group: dist.ProcessGroup) -> tuple[int, int] | None:
    """Return the first and the last rank of a group, or None for all ranks."""
    ranks = dist.get_process_group_ranks(group)
    return None if len(ranks) == dist.get_world_size() else (min(ranks), max(ranks))

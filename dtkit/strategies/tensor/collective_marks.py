"""Collectives within layers, as torch's tensor parallelism awaits them: marked in the midst of forward and backward.

torch begins such a collective and hands on a tensor that waits for it when it is first used. All of these are begun by
some functions of the module of functional collectives, and wait by another one. While slices compute, these are ours.
Beginning blocks nobody, so that only the waiting is marked; but a rank that is slowed on purpose is late already when
it begins, since its peers go on once it has.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import _functional_collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.engine.observe.phase_timer import PhaseTimer

_WAIT_FUNCTION = "wait_tensor"  # the function in which they do all their waiting
_COLLECTIVE_FUNCTIONS = (
    "all_reduce",
    "all_gather_single",
    "all_gather_tensor",  # its name before torch 2.13
    "reduce_scatter_single",
    "reduce_scatter_tensor",  # as above
    "all_to_all_single",
    "broadcast",
)


@contextlib.contextmanager
def mark_collectives(phases: PhaseTimer, ranks: tuple[int, int] | None) -> Iterator[None]:
    """Mark what is awaited while it lasts, as collectives among these ranks (as of :func:`format_ranks`)."""
    names = vars(_functional_collectives)
    before = {name: names[name] for name in (_WAIT_FUNCTION, *_COLLECTIVE_FUNCTIONS) if name in names}
    ours = {name: _wrap_collective(phases, before[name]) for name in before if name != _WAIT_FUNCTION}
    names.update(ours, **{_WAIT_FUNCTION: _wrap_wait(phases, ranks, before[_WAIT_FUNCTION])})
    try:
        yield
    finally:
        names.update(before)


def _wrap_collective(phases: PhaseTimer, collective: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        phases.apply_delay()
        return collective(*args, **kwargs)

    return late


def _wrap_wait(phases: PhaseTimer, ranks: tuple[int, int] | None, wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def blocked(tensor: Any) -> Any:
        phases.begin_collective(ranks)
        found = wait(tensor)
        phases.end_collective()
        return found

    return blocked


def rank_span(group: dist.ProcessGroup) -> tuple[int, int] | None:
    """The first and the last rank of a group; None of all ranks."""
    ranks = dist.get_process_group_ranks(group)
    return None if len(ranks) == dist.get_world_size() else (min(ranks), max(ranks))

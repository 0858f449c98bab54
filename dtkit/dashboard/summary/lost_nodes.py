"""Which nodes are lost: read from the events of a run, "lost" and "repair", each with the node's rank.

A repair without a rank ends all of that: the lost were replaced, or the run goes on without them. Then its world is
smaller than the one that it began with, and the ranks above those that were left out have moved down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dtkit.dashboard.run_view import RunView
    from dtkit.types import Event

LostNodes = dict[int, int]
"""The step at which each lost node went, by rank."""

_FIRST_ROWS = 1024  # rows: the first step of every rank is among them


def update_lost_nodes(lost_nodes: LostNodes, events: Iterable[Event]) -> LostNodes:
    """`lost` as it is after these events, so that a growing list is read once."""
    found = dict(lost_nodes)
    for event in events:
        if event.kind == "lost" and event.rank is not None:
            found[event.rank] = event.step
        elif event.kind == "repair" and event.rank is None:
            found.clear()
        elif event.kind == "repair" and event.rank is not None:
            found.pop(event.rank, None)
    return found


def count_initial_nodes(run: RunView) -> int:
    """How many nodes the run began with: more than its world has now, where some were left out."""
    first = run.history.rows(0, min(_FIRST_ROWS, len(run.history)))["rank"]
    return max(run.spec.world_size, int(first.max(initial=-1)) + 1)

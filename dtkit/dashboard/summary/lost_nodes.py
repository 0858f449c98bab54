"""Lost nodes, read from the events "lost" and "repair" of a run, each with the node's rank.

A repair without a rank clears all lost nodes: they were replaced, or the run goes on without them. In the second case
the world size is smaller than before, and higher ranks have moved down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.history.remembered import remember_while

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History
    from dtkit.types import Event

LostNodes = dict[int, int]
"""The step at which each node was lost, by rank."""

_FIRST_ROWS = 1024  # enough rows for the first step of every rank


def update_lost_nodes(lost_nodes: LostNodes, events: Iterable[Event]) -> LostNodes:
    """Return the lost nodes after new events, so that each event is read once."""
    updated = dict(lost_nodes)
    for event in events:
        if event.kind == "lost" and event.rank is not None:
            updated[event.rank] = event.step
        elif event.kind == "repair" and event.rank is None:
            updated.clear()
        elif event.kind == "repair" and event.rank is not None:
            updated.pop(event.rank, None)
    return updated


def count_initial_nodes(run: RunView) -> int:
    """Return the number of nodes at a run's start, which exceeds its world size if nodes were left out."""
    return max(run.spec.world_size, _count_first_ranks(run.history))


@remember_while(lambda history: min(len(history), _FIRST_ROWS))
def _count_first_ranks(history: History) -> int:
    return int(history.rows(0, _FIRST_ROWS)["rank"].max(initial=-1)) + 1

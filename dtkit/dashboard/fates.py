"""Which nodes are lost: read from the events of a run, "lost" and "repair", each with the node's rank.

A repair without a rank brings all of them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dtkit.records import Event

Lost = dict[int, int]
"""The step at which each lost node went, by rank."""


def follow(lost: Lost, events: Iterable[Event]) -> Lost:
    """`lost` as it is after these events, so that a growing list is read once."""
    found = dict(lost)
    for event in events:
        if event.kind == "lost" and event.rank is not None:
            found[event.rank] = event.step
        elif event.kind == "repair" and event.rank is None:
            found.clear()
        elif event.kind == "repair" and event.rank is not None:
            found.pop(event.rank, None)
    return found

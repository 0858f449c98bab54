"""What every view says in words: who is lost, whether the ranks agree, and who is slowed on purpose.

A remark has a kind, by which a view chooses glyph and colour. Its text alone says everything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dtkit import units
from dtkit.dashboard.fates import follow
from dtkit.dashboard.timing import named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.fates import Lost
    from dtkit.dashboard.source import Source
    from dtkit.records import Consistency

GLYPHS = {"lost": "✕", "differs": "✕", "identical": "✓", "slowed": "▼"}
"""The kinds of remarks, the most urgent first, and the sign that stands before each."""

ALERTS = ("lost", "differs")
"""The kinds that are alerts."""


@dataclasses.dataclass(frozen=True)
class Remark:
    """A sentence about the run. Its `kind` may be an alert's."""

    kind: str
    text: str


def remarks(source: Source, lost: Lost | None = None) -> list[Remark]:
    """All that is to be said now, the most urgent first; `lost` is read from the events unless the caller knows."""
    lost = follow({}, source.history.events) if lost is None else lost
    ranks = source.spec.world_size
    return [*_lost(lost, ranks), *_consistency(source.consistency, ranks), *_slowed(source)]


def _lost(lost: Lost, ranks: int) -> Iterator[Remark]:
    """Who went last, and how many are left."""
    if lost:
        gone = "was" if len(lost) == 1 else "were"
        left = units.plural(ranks - len(lost), "node")
        yield Remark(
            "lost", f"{named(sorted(lost))} {gone} lost at step {max(lost.values()):,}; {left} of {ranks:,} left"
        )


def _consistency(found: Consistency | None, ranks: int) -> Iterator[Remark]:
    if found is None or ranks < 2:
        return
    if not found.differing:
        text = f"parameters identical on {units.plural(ranks, 'node')}, checked at step {found.step:,}"
        yield Remark("identical", text)
        return
    differ = "differs" if len(found.differing) == 1 else "differ"
    since = found.step if found.since is None else found.since
    yield Remark("differs", f"{named(found.differing)} {differ} since step {since:,}: parameters are no longer equal")


def _slowed(source: Source) -> Iterator[Remark]:
    """One remark for all nodes that are slowed by the same factor."""
    by_factor: dict[float, list[int]] = {}
    for rank, factor in sorted(source.slowed.items()):
        if math.isfinite(factor) and factor != 1:
            by_factor.setdefault(factor, []).append(rank)
    for factor, ranks in by_factor.items():
        yield Remark("slowed", f"{named(ranks)} slowed {factor:g}x on purpose")

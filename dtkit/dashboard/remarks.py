"""What every view says in words: who is lost or stuck, whether the ranks agree, and who is slowed on purpose.

A remark has a kind, by which a view chooses glyph and colour. Its text alone says everything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.fates import begun, follow
from dtkit.dashboard.stuck import GLYPH, halted, sentence
from dtkit.dashboard.timing import named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.fates import Lost
    from dtkit.dashboard.source import Source
    from dtkit.types import Consistency

GLYPHS = {"lost": "✕", "stuck": GLYPH, "differs": "✕", "identical": "✓", "fewer": "○", "slowed": "▼"}
"""The kinds of remarks, the most urgent first, and the sign that stands before each."""

ALERTS = ("lost", "stuck", "differs")
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
    return [
        *_lost(lost, ranks),
        *_stuck(source),
        *_consistency(source.consistency, ranks),
        *([] if lost else _fewer(source)),
        *_slowed(source),
    ]


def _lost(lost: Lost, ranks: int) -> Iterator[Remark]:
    """Who went last, and how many are left."""
    if lost:
        gone = "was" if len(lost) == 1 else "were"
        left = formatting.plural(ranks - len(lost), "node")
        yield Remark(
            "lost", f"{named(sorted(lost))} {gone} lost at step {max(lost.values()):,}; {left} of {ranks:,} left"
        )


def _stuck(source: Source) -> Iterator[Remark]:
    found = halted(source)
    if found is not None:
        yield Remark("stuck", formatting.plain(sentence(found), 600))


def _fewer(source: Source) -> Iterator[Remark]:
    """That nodes were left out for good."""
    first, ranks = begun(source), source.spec.world_size
    if first > ranks:
        out = first - ranks
        be = "was" if out == 1 else "were"
        yield Remark("fewer", f"{formatting.plural(ranks, 'node')}: {out:,} of {first:,} {be} lost and left out")


def _consistency(found: Consistency | None, ranks: int) -> Iterator[Remark]:
    if found is None or ranks < 2:
        return
    if not found.differing:
        yield Remark("identical", f"{_same(found, ranks)}, checked at step {found.step:,}")
        return
    differ = "differs" if len(found.differing) == 1 else "differ"
    since = found.step if found.since is None else found.since
    yield Remark("differs", f"{named(found.differing)} {differ} since step {since:,}: parameters are no longer equal")


def _same(found: Consistency, ranks: int) -> str:
    """What was compared: copies of the whole model, or of its parts, or what is not cut into parts."""
    if found.copies is None:
        return f"parameters identical on {formatting.plural(ranks, 'node')}"
    if found.copies > 1:
        return f"parameters identical between {formatting.plural(found.copies, 'replica')}"
    return f"parameters that are not cut identical on {formatting.plural(ranks, 'node')}"


def _slowed(source: Source) -> Iterator[Remark]:
    """One remark for all nodes that are slowed by the same factor."""
    by_factor: dict[float, list[int]] = {}
    for rank, factor in sorted(source.delay_factors.items()):
        if math.isfinite(factor) and factor != 1:
            by_factor.setdefault(factor, []).append(rank)
    for factor, ranks in by_factor.items():
        yield Remark("slowed", f"{named(ranks)} slowed {factor:g}x on purpose")

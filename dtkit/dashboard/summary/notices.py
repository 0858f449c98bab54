"""What every view says in words: who is lost or stuck, whether the ranks agree, and who is slowed on purpose.

A remark has a kind, by which a view chooses glyph and colour. Its text alone says everything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.summary.lost_nodes import count_initial_nodes, update_lost_nodes
from dtkit.dashboard.summary.stall import STUCK_GLYPH, find_stall, format_sentence
from dtkit.dashboard.summary.timing import format_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.lost_nodes import LostNodes
    from dtkit.types import ReplicaCheckResult

NOTICE_GLYPHS = {"lost": "✕", "stuck": STUCK_GLYPH, "differs": "✕", "identical": "✓", "fewer": "○", "slowed": "▼"}
"""The kinds of remarks, the most urgent first, and the sign that stands before each."""

ALERT_KINDS = ("lost", "stuck", "differs")
"""The kinds that are alerts."""


@dataclasses.dataclass(frozen=True)
class Notice:
    """A sentence about the run. Its `kind` may be an alert's."""

    kind: str
    text: str


def collect_notices(run: RunView, lost_nodes: LostNodes | None = None) -> list[Notice]:
    """All that is to be said now, the most urgent first; `lost` is read from the events unless the caller knows."""
    lost_nodes = update_lost_nodes({}, run.history.events) if lost_nodes is None else lost_nodes
    ranks = run.spec.world_size
    return [
        *_make_lost_notice(lost_nodes, ranks),
        *_make_stuck_notice(run),
        *_make_consistency_notice(run.consistency, ranks),
        *([] if lost_nodes else _make_left_out_notice(run)),
        *_make_delay_notices(run),
    ]


def _make_lost_notice(lost_nodes: LostNodes, num_ranks: int) -> Iterator[Notice]:
    """Who went last, and how many are left."""
    if lost_nodes:
        gone = "was" if len(lost_nodes) == 1 else "were"
        left = formatting.format_count(num_ranks - len(lost_nodes), "node")
        yield Notice(
            "lost",
            f"{format_nodes(sorted(lost_nodes))} {gone} lost at step {max(lost_nodes.values()):,}; {left} of {num_ranks:,} left",
        )


def _make_stuck_notice(run: RunView) -> Iterator[Notice]:
    found = find_stall(run)
    if found is not None:
        yield Notice("stuck", formatting.sanitize_text(format_sentence(found), 600))


def _make_left_out_notice(run: RunView) -> Iterator[Notice]:
    """That nodes were left out for good."""
    first, ranks = count_initial_nodes(run), run.spec.world_size
    if first > ranks:
        out = first - ranks
        be = "was" if out == 1 else "were"
        yield Notice("fewer", f"{formatting.format_count(ranks, 'node')}: {out:,} of {first:,} {be} lost and left out")


def _make_consistency_notice(consistency: ReplicaCheckResult | None, num_ranks: int) -> Iterator[Notice]:
    if consistency is None or num_ranks < 2:
        return
    if not consistency.differing_ranks:
        yield Notice("identical", f"{_describe_compared(consistency, num_ranks)}, checked at step {consistency.step:,}")
        return
    differ = "differs" if len(consistency.differing_ranks) == 1 else "differ"
    since = consistency.step if consistency.differing_since is None else consistency.differing_since
    yield Notice(
        "differs",
        f"{format_nodes(consistency.differing_ranks)} {differ} since step {since:,}: parameters are no longer equal",
    )


def _describe_compared(consistency: ReplicaCheckResult, num_ranks: int) -> str:
    """What was compared: copies of the whole model, or of its parts, or what is not cut into parts."""
    if consistency.num_holders is None:
        return f"parameters identical on {formatting.format_count(num_ranks, 'node')}"
    if consistency.num_holders > 1:
        return f"parameters identical between {formatting.format_count(consistency.num_holders, 'replica')}"
    return f"parameters that are not cut identical on {formatting.format_count(num_ranks, 'node')}"


def _make_delay_notices(run: RunView) -> Iterator[Notice]:
    """One remark for all nodes that are slowed by the same factor."""
    by_factor: dict[float, list[int]] = {}
    for rank, factor in sorted(run.delay_factors.items()):
        if math.isfinite(factor) and factor != 1:
            by_factor.setdefault(factor, []).append(rank)
    for factor, ranks in by_factor.items():
        yield Notice("slowed", f"{format_nodes(ranks)} slowed {factor:g}x on purpose")

"""A step of sharded or tensor-parallel training taken apart, as text, as HTML and as a figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard import chapters
from dtkit.dashboard.axes import COLOURS, INK, MUTED, tidy
from dtkit.dashboard.chapters import Chapter, Table
from dtkit.dashboard.figures import new_figure
from dtkit.dashboard.step_text import MAX_RANKS, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.explain.sharded import CollectiveGroup, ShardedExplanation, ShardedRank

_COLOURS = dict(zip(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"), COLOURS, strict=False))
_NAMED = 4  # ranks of a group, up to which they are listed
_MORE = 1.2  # times the textbook's bytes, from which on somebody sends otherwise than in a ring


def text(explanation: ShardedExplanation) -> str:
    """The step in a page of text."""
    return chapters.text(headline(explanation), _chapters(explanation))


def page(explanation: ShardedExplanation) -> str:
    """The same as HTML."""
    return chapters.page(headline(explanation), _chapters(explanation))


def headline(explanation: ShardedExplanation) -> str:
    """``Step 7 of Net on 2 ranks, epoch 2: 27 collectives``."""
    where = f"Step {explanation.step:,} of {formatting.plain(explanation.model, 60)}"
    ranks, count = (
        formatting.plural(len(explanation.ranks), "rank"),
        formatting.plural(len(explanation.collectives), "collective"),
    )
    return f"{where} on {ranks}, epoch {explanation.epoch + 1:,}: {count}"


def verdict(explanation: ShardedExplanation) -> str:
    """Whether ranks were in step, and got the same where they should."""
    if not explanation.is_aligned:
        return "The ranks did NOT make the same collectives in the same order."
    if not explanation.is_agreed:
        return "Some results that should be the same on all ranks are NOT."
    who = "All ranks" if among_all(explanation) else "The ranks of each group"
    return f"{who} made the same collectives, and got the same results where they should, bit by bit."


def among_all(explanation: ShardedExplanation) -> bool:
    """Whether every collective is among all ranks; with replicas, some are among some of them only."""
    return all(len(one.ranks) == len(explanation.ranks) for one in explanation.collectives)


def traffic(explanation: ShardedExplanation) -> str:
    """Bytes by the textbook, and as counted."""
    rule, counted = explanation.expected_bytes, explanation.sent_bytes
    found = f"Sent by a rank: {formatting.size(counted)} counted, {formatting.size(rule)} by the textbook's rings."
    scatters = sum(g.expected_bytes for g in explanation.groups if g.what == "reduce_scatter")
    if scatters and math.isclose(counted, rule + scatters, rel_tol=0.05):
        return f"{found} The difference is what reduce-scatter should send: this backend makes an all-reduce of it."
    return found


def _chapters(explanation: ShardedExplanation) -> tuple[Chapter, Chapter, Chapter]:
    return _ranks(explanation), _collectives(explanation), _update(explanation)


def _ranks(explanation: ShardedExplanation) -> Chapter:
    body = [
        [
            str(r.rank),
            f"{r.samples:,}",
            number(r.loss),
            f"{r.held_bytes:,}",
            formatting.share(r.held_bytes / r.whole_bytes),
        ]
        for r in explanation.ranks[:MAX_RANKS]
    ]
    return Chapter(
        "Each rank holds a part of the parameters.",
        Table(("rank", "samples", "loss", "bytes of parameters", "of all"), body, frozenset()),
        [*_more(explanation), *_shared(explanation), f"loss of the step: {number(explanation.loss)}"],
    )


def _shared(explanation: ShardedExplanation) -> list[str]:
    """That samples in the table count once."""
    if all(rank.speaks for rank in explanation.ranks):
        return []
    return [
        f"Ranks that share a replica take the same samples: {formatting.plural(explanation.samples, 'sample')} in all."
    ]


def _collectives(explanation: ShardedExplanation) -> Chapter:
    body = [_group_row(group) for group in explanation.groups]
    which = "Collectives" if among_all(explanation) else f"Collectives of rank {explanation.recording_rank}"
    return Chapter(
        f"Ranks put together what they need, and add up what they have, while they compute. {which} by phase:",
        Table(("phase", "collective", "ranks", "count", "bytes", "sent by a rank, in a ring"), body, _WORDS),
        [traffic(explanation), verdict(explanation)],
    )


_WORDS = frozenset({"phase", "collective", "ranks"})


def _group_row(group: CollectiveGroup) -> list[str]:
    sent = f"{group.expected_bytes:,.0f}"
    return [group.phase, name(group.what), among(group.ranks), f"{group.count:,}", f"{group.nbytes:,}", sent]


def name(what: str) -> str:
    """``all-reduce`` and so on, as people write it."""
    return what.replace("_", "-")


def among(ranks: Sequence[int]) -> str:
    """``0, 2``, or how many where these are many."""
    return ", ".join(map(str, ranks)) if len(ranks) <= _NAMED else f"{len(ranks):,} ranks"


def _update(explanation: ShardedExplanation) -> Chapter:
    body = [_checksums(rank) for rank in explanation.ranks[:MAX_RANKS]]
    table = Table(("rank", "before", "after"), body, frozenset({"before", "after"}))
    if not explanation.updated:
        return Chapter("No update: the gradients are not finite. Checksums of each rank's parts:", table, [])
    title = f"Each rank updates its own parts (learning rate {explanation.ranks[0].lr:g}). Checksums of these:"
    return Chapter(title, table, _more(explanation))


def _checksums(rank: ShardedRank) -> list[str]:
    return [str(rank.rank), rank.before, formatting.NOTHING if rank.after is None else rank.after]


def _more(explanation: ShardedExplanation) -> list[str]:
    rest = len(explanation.ranks) - MAX_RANKS
    return [f"and {formatting.plural(rest, 'more rank')}"] if rest > 0 else []


# -- the figure ------------------------------------------------------------------------------------------------------


def slices_figure(explanation: ShardedExplanation) -> Figure:
    """Bytes by phase and collective; and all together, by the textbook and as counted."""
    groups = explanation.groups
    figure = new_figure(10.5, 1.7 + 0.34 * max(3, len(groups)))
    figure.suptitle(
        headline(explanation), x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=INK, parse_math=False
    )
    parts, sums = figure.subplots(1, 2, width_ratios=(1.5, 1))
    longest = max(explanation.expected_bytes, explanation.sent_bytes, 1)
    unit, one = formatting.unit_for(longest, formatting.BYTES)
    among_some = None if among_all(explanation) else explanation.recording_rank
    _draw_groups(parts, groups, one, among_some)
    _draw_sums(sums, explanation, one)
    for ax in (parts, sums):
        _tidy(ax, unit)
    figure.supxlabel(verdict(explanation), x=0.012, ha="left", fontsize=9, fontweight="bold", color=INK)
    return figure


def _draw_groups(ax: Axes, groups: tuple[CollectiveGroup, ...], one: float, witness: int | None) -> None:
    """A bar a group. Where they are not all among all ranks, they are those of `recording_rank`, and named by their ranks."""
    for k, group in enumerate(groups):
        ax.barh(k, group.expected_bytes / one, height=0.66, color=_COLOURS[group.what])
        ax.annotate(
            f"{group.count:,} of {formatting.size(group.nbytes)} together", (group.expected_bytes / one, k),
            xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=INK,
        )  # fmt: skip
    whose, named = ("a rank", False) if witness is None else (f"rank {witness}", True)
    names = [f"{g.phase}: {name(g.what)}{f', ranks {among(g.ranks)}' if named else ''}" for g in groups]
    ax.set_yticks(range(len(groups)), names)
    ax.set_ylim(len(groups) - 0.4, -0.6)
    ax.set_xlim(0, 1.55 * max((g.expected_bytes for g in groups), default=1) / one or 1)
    ax.set_title(f"Sent by {whose}, in a ring", loc="left", fontsize=10, fontweight="bold", color=INK)


def _draw_sums(ax: Axes, explanation: ShardedExplanation, one: float) -> None:
    left = 0.0
    for group in explanation.groups:
        ax.barh(0, group.expected_bytes / one, left=left, height=0.55, color=_COLOURS[group.what])
        left += group.expected_bytes / one
    ax.barh(1, explanation.sent_bytes / one, height=0.55, color=MUTED)
    longest = max(explanation.expected_bytes, explanation.sent_bytes) / one
    for y, value in enumerate((explanation.expected_bytes, explanation.sent_bytes)):
        ax.annotate(formatting.size(value), (value / one, y), xytext=(5, 0), textcoords="offset points", va="center",
                    fontsize=8, color=INK)  # fmt: skip
    more = explanation.sent_bytes > _MORE * explanation.expected_bytes
    ax.set_yticks((0, 1), ["textbook", "counted"])
    ax.set_ylim(1.6, -0.6)
    ax.set_xlim(0, 1.3 * longest or 1)
    note = "more than rings" if more else ""
    ax.set_title("All of a step together", loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_title(note, loc="right", fontsize=8, color=MUTED)


def _tidy(ax: Axes, unit: str) -> None:
    tidy(ax, "x", INK)
    ax.set_xlabel(unit, fontsize=8, color=MUTED)

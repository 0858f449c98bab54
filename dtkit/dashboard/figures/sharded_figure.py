"""A step of sharded or tensor-parallel training taken apart, as text, as HTML and as a figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.figures.run_figure import create_figure
from dtkit.dashboard.figures.style import COLORS, MUTED_COLOR, TEXT_COLOR, style_axes
from dtkit.dashboard.text import sections
from dtkit.dashboard.text.data_parallel_text import MAX_RANKS, format_number
from dtkit.dashboard.text.sections import Section, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.explain.sharded import CollectiveGroup, ShardedExplanation, ShardedRank

_COLLECTIVE_COLORS = dict(
    zip(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"), COLORS, strict=False)
)
_MAX_LISTED_RANKS = 4  # ranks of a group, up to which they are listed
_EXCESS_RATIO = 1.2  # times the textbook's bytes, from which on somebody sends otherwise than in a ring


def format_text(explanation: ShardedExplanation) -> str:
    """The step in a page of text."""
    return sections.format_text(format_headline(explanation), _make_sections(explanation))


def format_html(explanation: ShardedExplanation) -> str:
    """The same as HTML."""
    return sections.format_html(format_headline(explanation), _make_sections(explanation))


def format_headline(explanation: ShardedExplanation) -> str:
    """``Step 7 of Net on 2 ranks, epoch 2: 27 collectives``."""
    where = f"Step {explanation.step:,} of {formatting.sanitize_text(explanation.model, 60)}"
    ranks, count = (
        formatting.format_count(len(explanation.ranks), "rank"),
        formatting.format_count(len(explanation.collectives), "collective"),
    )
    return f"{where} on {ranks}, epoch {explanation.epoch + 1:,}: {count}"


def describe_agreement(explanation: ShardedExplanation) -> str:
    """Whether ranks were in step, and got the same where they should."""
    if not explanation.is_aligned:
        return "The ranks did NOT make the same collectives in the same order."
    if not explanation.is_agreed:
        return "Some results that should be the same on all ranks are NOT."
    who = "All ranks" if is_among_all_ranks(explanation) else "The ranks of each group"
    return f"{who} made the same collectives, and got the same results where they should, bit by bit."


def is_among_all_ranks(explanation: ShardedExplanation) -> bool:
    """Whether every collective is among all ranks; with replicas, some are among some of them only."""
    return all(len(one.ranks) == len(explanation.ranks) for one in explanation.collectives)


def describe_traffic(explanation: ShardedExplanation) -> str:
    """Bytes by the textbook, and as counted."""
    rule, counted = explanation.expected_bytes, explanation.sent_bytes
    found = f"Sent by a rank: {formatting.format_bytes(counted)} counted, {formatting.format_bytes(rule)} by the textbook's rings."
    scatters = sum(g.expected_bytes for g in explanation.groups if g.what == "reduce_scatter")
    if scatters and math.isclose(counted, rule + scatters, rel_tol=0.05):
        return f"{found} The difference is what reduce-scatter should send: this backend makes an all-reduce of it."
    return found


def _make_sections(explanation: ShardedExplanation) -> tuple[Section, Section, Section]:
    return _make_ranks_section(explanation), _make_collectives_section(explanation), _make_update_section(explanation)


def _make_ranks_section(explanation: ShardedExplanation) -> Section:
    body = [
        [
            str(r.rank),
            f"{r.samples:,}",
            format_number(r.loss),
            f"{r.held_bytes:,}",
            formatting.format_percent(r.held_bytes / r.whole_bytes),
        ]
        for r in explanation.ranks[:MAX_RANKS]
    ]
    return Section(
        "Each rank holds a part of the parameters.",
        Table(("rank", "samples", "loss", "bytes of parameters", "of all"), body, frozenset()),
        [
            *_format_remaining(explanation),
            *_describe_shared_samples(explanation),
            f"loss of the step: {format_number(explanation.loss)}",
        ],
    )


def _describe_shared_samples(explanation: ShardedExplanation) -> list[str]:
    """That samples in the table count once."""
    if all(rank.speaks for rank in explanation.ranks):
        return []
    return [
        f"Ranks that share a replica take the same samples: {formatting.format_count(explanation.samples, 'sample')} in all."
    ]


def _make_collectives_section(explanation: ShardedExplanation) -> Section:
    body = [_format_group_row(group) for group in explanation.groups]
    which = "Collectives" if is_among_all_ranks(explanation) else f"Collectives of rank {explanation.recording_rank}"
    return Section(
        f"Ranks put together what they need, and add up what they have, while they compute. {which} by phase:",
        Table(("phase", "collective", "ranks", "count", "bytes", "sent by a rank, in a ring"), body, _TEXT_COLUMNS),
        [describe_traffic(explanation), describe_agreement(explanation)],
    )


_TEXT_COLUMNS = frozenset({"phase", "collective", "ranks"})


def _format_group_row(group: CollectiveGroup) -> list[str]:
    sent = f"{group.expected_bytes:,.0f}"
    return [
        group.phase,
        format_collective_name(group.what),
        format_ranks(group.ranks),
        f"{group.count:,}",
        f"{group.nbytes:,}",
        sent,
    ]


def format_collective_name(collective: str) -> str:
    """``all-reduce`` and so on, as people write it."""
    return collective.replace("_", "-")


def format_ranks(ranks: Sequence[int]) -> str:
    """``0, 2``, or how many where these are many."""
    return ", ".join(map(str, ranks)) if len(ranks) <= _MAX_LISTED_RANKS else f"{len(ranks):,} ranks"


def _make_update_section(explanation: ShardedExplanation) -> Section:
    body = [_format_checksum_row(rank) for rank in explanation.ranks[:MAX_RANKS]]
    table = Table(("rank", "before", "after"), body, frozenset({"before", "after"}))
    if not explanation.updated:
        return Section("No update: the gradients are not finite. Checksums of each rank's parts:", table, [])
    title = f"Each rank updates its own parts (learning rate {explanation.ranks[0].lr:g}). Checksums of these:"
    return Section(title, table, _format_remaining(explanation))


def _format_checksum_row(rank: ShardedRank) -> list[str]:
    return [str(rank.rank), rank.before, formatting.UNKNOWN if rank.after is None else rank.after]


def _format_remaining(explanation: ShardedExplanation) -> list[str]:
    rest = len(explanation.ranks) - MAX_RANKS
    return [f"and {formatting.format_count(rest, 'more rank')}"] if rest > 0 else []


# -- the figure ------------------------------------------------------------------------------------------------------


def draw_sharded_step(explanation: ShardedExplanation) -> Figure:
    """Bytes by phase and collective; and all together, by the textbook and as counted."""
    groups = explanation.groups
    figure = create_figure(10.5, 1.7 + 0.34 * max(3, len(groups)))
    figure.suptitle(
        format_headline(explanation),
        x=0.012,
        ha="left",
        fontsize=11.5,
        fontweight="bold",
        color=TEXT_COLOR,
        parse_math=False,
    )
    parts, sums = figure.subplots(1, 2, width_ratios=(1.5, 1))
    longest = max(explanation.expected_bytes, explanation.sent_bytes, 1)
    unit, one = formatting.choose_unit(longest, formatting.BYTE_UNITS)
    among_some = None if is_among_all_ranks(explanation) else explanation.recording_rank
    _draw_groups(parts, groups, one, among_some)
    _draw_totals(sums, explanation, one)
    for ax in (parts, sums):
        _style_panel(ax, unit)
    figure.supxlabel(
        describe_agreement(explanation), x=0.012, ha="left", fontsize=9, fontweight="bold", color=TEXT_COLOR
    )
    return figure


def _draw_groups(ax: Axes, groups: tuple[CollectiveGroup, ...], unit_size: float, recording_rank: int | None) -> None:
    """A bar a group. Where they are not all among all ranks, they are those of `recording_rank`, and named by their ranks."""
    for k, group in enumerate(groups):
        ax.barh(k, group.expected_bytes / unit_size, height=0.66, color=_COLLECTIVE_COLORS[group.what])
        ax.annotate(
            f"{group.count:,} of {formatting.format_bytes(group.nbytes)} together", (group.expected_bytes / unit_size, k),
            xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=TEXT_COLOR,
        )  # fmt: skip
    whose, named = ("a rank", False) if recording_rank is None else (f"rank {recording_rank}", True)
    names = [
        f"{g.phase}: {format_collective_name(g.what)}{f', ranks {format_ranks(g.ranks)}' if named else ''}"
        for g in groups
    ]
    ax.set_yticks(range(len(groups)), names)
    ax.set_ylim(len(groups) - 0.4, -0.6)
    ax.set_xlim(0, 1.55 * max((g.expected_bytes for g in groups), default=1) / unit_size or 1)
    ax.set_title(f"Sent by {whose}, in a ring", loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR)


def _draw_totals(ax: Axes, explanation: ShardedExplanation, unit_size: float) -> None:
    left = 0.0
    for group in explanation.groups:
        ax.barh(0, group.expected_bytes / unit_size, left=left, height=0.55, color=_COLLECTIVE_COLORS[group.what])
        left += group.expected_bytes / unit_size
    ax.barh(1, explanation.sent_bytes / unit_size, height=0.55, color=MUTED_COLOR)
    longest = max(explanation.expected_bytes, explanation.sent_bytes) / unit_size
    for y, value in enumerate((explanation.expected_bytes, explanation.sent_bytes)):
        ax.annotate(formatting.format_bytes(value), (value / unit_size, y), xytext=(5, 0), textcoords="offset points", va="center",
                    fontsize=8, color=TEXT_COLOR)  # fmt: skip
    more = explanation.sent_bytes > _EXCESS_RATIO * explanation.expected_bytes
    ax.set_yticks((0, 1), ["textbook", "counted"])
    ax.set_ylim(1.6, -0.6)
    ax.set_xlim(0, 1.3 * longest or 1)
    note = "more than rings" if more else ""
    ax.set_title("All of a step together", loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR)
    ax.set_title(note, loc="right", fontsize=8, color=MUTED_COLOR)


def _style_panel(ax: Axes, unit: str) -> None:
    style_axes(ax, "x", TEXT_COLOR)
    ax.set_xlabel(unit, fontsize=8, color=MUTED_COLOR)

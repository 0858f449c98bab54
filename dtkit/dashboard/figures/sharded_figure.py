"""The figure of an explained step of sharded training: bytes by phase and collective, and their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import FIT_WIDTH_IN, create_figure
from dtkit.dashboard.text.sharded_text import (
    describe_agreement,
    format_collective_name,
    format_headline,
    format_ranks,
    is_among_all_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.explain.sharded import CollectiveGroup, ShardedExplanation

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_COLLECTIVE_COLORS = dict(zip(_COLLECTIVES, style.COLORS, strict=False))
_EXCESS_RATIO = 1.2  # times the bytes of rings, from which a note reports that more was sent


def draw_sharded_step(explanation: ShardedExplanation) -> Figure:
    """Draw the bytes of each group of collectives, and of all: by the ring algorithms, and as counted."""
    groups = explanation.groups
    upper, lower = 0.34 * max(3, len(groups)), 0.7
    figure = create_figure(FIT_WIDTH_IN, upper + lower + 2.4)
    style.set_figure_title(figure, format_headline(explanation))
    groups_axes, totals_axes = figure.subplots(2, 1, height_ratios=(upper, lower))
    longest = max(explanation.expected_bytes, explanation.sent_bytes, 1)
    unit, unit_size = formatting.choose_unit(longest, formatting.BYTE_UNITS)
    for ax in (groups_axes, totals_axes):
        style.style_axes(ax, "x", style.TEXT_COLOR)
        ax.set_xlabel(unit, fontsize=8, color=style.MUTED_COLOR)
    recording_rank = None if is_among_all_ranks(explanation) else explanation.recording_rank
    _draw_groups(groups_axes, groups, unit_size, recording_rank)
    _draw_totals(totals_axes, explanation, unit_size)
    style.set_figure_note(figure, describe_agreement(explanation))
    return figure


def _draw_groups(ax: Axes, groups: Sequence[CollectiveGroup], unit_size: float, recording_rank: int | None) -> None:
    """Draw a bar for each group. With a `recording_rank`, groups include some ranks only, and are named by them."""
    for y, group in enumerate(groups):
        ax.barh(y, group.expected_bytes / unit_size, height=0.66, color=_COLLECTIVE_COLORS[group.operation])
        text = f"{group.count:,} of {formatting.format_bytes(group.nbytes)} together"
        style.write_beside(ax, text, group.expected_bytes / unit_size, y)
    ax.set_yticks(range(len(groups)), [_name_group(group, with_ranks=recording_rank is not None) for group in groups])
    ax.set_ylim(len(groups) - 0.4, -0.6)
    ax.set_xlim(0, 1.55 * max((group.expected_bytes for group in groups), default=1) / unit_size or 1)
    sender = "a node" if recording_rank is None else f"node {recording_rank}"
    style.set_title(ax, f"Sent by {sender}")


def _name_group(group: CollectiveGroup, *, with_ranks: bool) -> str:
    name = f"{group.phase}: {format_collective_name(group.operation)}"
    return f"{name}, nodes {format_ranks(group.ranks)}" if with_ranks else name


def _draw_totals(ax: Axes, explanation: ShardedExplanation, unit_size: float) -> None:
    end = 0.0
    for group in explanation.groups:
        size = group.expected_bytes / unit_size
        ax.barh(0, size, left=end, height=0.55, color=_COLLECTIVE_COLORS[group.operation])
        end += size
    ax.barh(1, explanation.sent_bytes / unit_size, height=0.55, color=style.MUTED_COLOR)
    totals = (explanation.expected_bytes, explanation.sent_bytes)
    for y, total in enumerate(totals):
        style.write_beside(ax, formatting.format_bytes(total), total / unit_size, y)
    ax.set_yticks((0, 1), ["textbook", "counted"])
    ax.set_ylim(1.6, -0.6)
    ax.set_xlim(0, 1.3 * max(totals) / unit_size or 1)
    sent_more = explanation.sent_bytes > _EXCESS_RATIO * explanation.expected_bytes
    style.set_title(ax, "All of a step together", "more than rings" if sent_more else "")

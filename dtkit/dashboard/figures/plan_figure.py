"""The figure of a plan: memory against the free memory, and the time of a step, by strategy."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import FIT_WIDTH_IN, create_figure
from dtkit.dashboard.text.plan_text import (
    MEMORY_PARTS,
    describe_fastest,
    find_slowest_row,
    find_tightest_row,
    format_headline,
    format_step_time,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.planning.plan import Plan, PlanRow

PART_COLORS = {
    "sent_model": "#b9b9b9",
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#CC79A7",
    "activations": "#E69F00",
    "overhead": "#F3D9A4",
}
"""Colors of the parts of a rank's memory."""

_BAR_HEIGHT = 0.62
_NAME_WRAP_CHARS = 28
_FAR_LIMIT_RATIO = 3.0  # free memory further off than this many bars is written and not drawn


def draw_plan(plan: Plan) -> Figure:
    """Draw the memory of each strategy's tightest rank against the free memory, and the time of its slowest one."""
    alone = [] if plan.one_process is None else [plan.one_process]
    rows, slowest = (
        [*(find(plan.get_rows(name)) for name in plan.strategies), *alone]
        for find in (find_tightest_row, find_slowest_row)
    )
    names = [textwrap.fill(formatting.sanitize_text(row.strategy, 80), _NAME_WRAP_CHARS) for row in rows]
    lines = max(name.count("\n") + 1 for name in names)
    figure = create_figure(FIT_WIDTH_IN, 3.0 + (0.6 + 0.24 * lines) * len(rows))
    memory_axes, time_axes = figure.subplots(2, 1)
    _draw_memory(memory_axes, rows)
    _draw_time(time_axes, slowest)
    for ax in (memory_axes, time_axes):
        ax.set_yticks(range(len(rows)), names, fontsize=8)
        ax.set_ylim(len(rows) - 0.5, -0.5)
    style.set_figure_title(figure, format_headline(plan))
    if fastest := describe_fastest(plan):
        style.set_figure_note(figure, fastest)
    style.fit_texts(figure)
    return figure


def _draw_memory(ax: Axes, rows: Sequence[PlanRow]) -> None:
    unit, unit_size = formatting.choose_unit(max(row.needed for row in rows), formatting.BYTE_UNITS)
    ends = [0.0] * len(rows)
    for field, name in MEMORY_PARTS:
        sizes = [getattr(row, field) / unit_size for row in rows]
        ax.barh(range(len(rows)), sizes, left=ends, height=_BAR_HEIGHT, color=PART_COLORS[field], label=name)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    longest = max(ends)
    for y, (row, end) in enumerate(zip(rows, ends, strict=True)):
        _mark_free_memory(ax, row, end, y, unit_size, longest)
    ax.set_xlim(0, 1.35 * longest or 1)
    style.style_axes(ax, "x", style.TEXT_COLOR)
    style.set_title(ax, "Memory per node", "tightest node · upright mark: free")
    style.format_bar_axis(ax, 3, fontsize=8, unit=unit)


def _mark_free_memory(ax: Axes, row: PlanRow, end: float, y: int, unit_size: float, longest: float) -> None:
    """Mark the free memory, or write it where a mark would make the bars vanish."""
    free = row.free / unit_size
    if free <= _FAR_LIMIT_RATIO * longest:
        ax.plot([free, free], [y - 0.42, y + 0.42], color=style.TEXT_COLOR, linewidth=2, gid="free")
    else:
        style.write_beside(ax, f"of {formatting.format_bytes(row.free)} free", end, y)
    if not row.fits:
        style.write_beside(ax, "does not fit", end, y, color=style.COLORS[5], fontweight="bold")


def _draw_time(ax: Axes, rows: Sequence[PlanRow]) -> None:
    longest = max(row.step_s for row in rows)
    unit, unit_size = formatting.choose_unit(longest, formatting.SECOND_UNITS)
    others = [row.other_s / unit_size if row.is_measured else 0.0 for row in rows]
    waiting = [
        row.communication_s / unit_size if row.is_traffic_counted or not row.is_measured else 0.0 for row in rows
    ]
    computing = [row.compute_s / unit_size for row in rows]
    positions, ends = range(len(rows)), [0.0] * len(rows)
    parts = [
        ("computing, slowest node", computing, style.COLORS[2]),
        ("communication not hidden", waiting, style.COLORS[5]),
        ("other: rows, Python, waiting", others, "#b9b9b9"),
    ]
    for name, lengths, color in parts[: 2 + any(others)]:
        ax.barh(positions, lengths, left=ends, height=_BAR_HEIGHT, color=color, label=name)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for y, row in enumerate(rows):
        sent = f"{formatting.format_bytes(row.sent_bytes)} sent"
        traffic = sent if row.is_traffic_counted else "what is sent not counted"
        style.write_beside(ax, f"{format_step_time(row)}, {traffic}", row.step_s / unit_size, y)
    ax.set_xlim(0, 1.8 * longest / unit_size or 1)
    style.style_axes(ax, "x", style.TEXT_COLOR)
    style.set_title(ax, "Time per step")
    style.format_bar_axis(ax, 2, fontsize=8, unit=unit)

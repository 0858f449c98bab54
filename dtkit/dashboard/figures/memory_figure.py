"""The figure of memory by rank: a bar for the measured memory, and a hollow one behind it for the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.plan_figure import PART_COLORS
from dtkit.dashboard.figures.render import FIT_WIDTH_IN, create_figure
from dtkit.dashboard.text.memory_text import MEASURED_PARTS, format_headline, select_rows
from dtkit.planning.memory_report import convert_plan_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.planning.memory_report import Memory, MemoryRow

_MEASURED_HEIGHT, _PLANNED_HEIGHT = 0.46, 0.78
_LIMIT_HALF_HEIGHT = 0.43
_MAX_LIMIT_RATIO = 4.0  # a limit further off than this many bars would make the bars vanish


def draw_memory(memory: Memory) -> Figure:
    """Draw a bar for each rank in a plan's colors, with its plan behind it and a mark at its limit."""
    rows = select_rows(memory)
    planned = [convert_plan_row(row) for row in rows]
    longest = max([row.total for row in rows] + [parts["peak"] for parts in planned if parts])
    unit, unit_size = formatting.choose_unit(longest, formatting.BYTE_UNITS)
    limits = [row.limit for row in rows if row.limit is not None]
    shows_limits = bool(limits) and max(limits) <= _MAX_LIMIT_RATIO * longest
    figure = create_figure(FIT_WIDTH_IN, 1.75 + 0.5 * len(rows))
    ax = figure.subplots()
    _draw_bars(ax, rows, planned, unit_size)
    _annotate_bars(ax, rows, unit_size, show_limits=shows_limits)
    ax.set_xlim(0, 1.6 * max(longest, *(limits if shows_limits else [1])) / unit_size)
    ax.set_yticks(range(len(rows)), [f"node {row.rank}" for row in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    style.style_axes(ax, "x", style.TEXT_COLOR)
    note = "; hollow: as planned" * any(planned) + "; upright mark: the limit" * shows_limits
    style.set_title(ax, "Held at most by each node", unit + note)
    style.format_bar_axis(ax, 3, fontsize=8)
    style.set_figure_title(figure, format_headline(memory))
    return figure


def _draw_bars(ax: Axes, rows: Sequence[MemoryRow], planned: Sequence[dict[str, int] | None], unit_size: float) -> None:
    positions = [k for k, parts in enumerate(planned) if parts is not None]
    measured_ends, planned_ends = [0.0] * len(rows), [0.0] * len(rows)
    for field, name in MEASURED_PARTS:
        sizes = [(getattr(row, field) or 0) / unit_size for row in rows]
        outlines = [(parts or {}).get(field, 0) / unit_size for parts in planned]
        if not any(sizes + outlines):
            continue
        ax.barh(
            positions, [outlines[k] for k in positions], left=[planned_ends[k] for k in positions],
            height=_PLANNED_HEIGHT, facecolor="white", edgecolor=PART_COLORS[field], linewidth=1.6, gid="planned",
            zorder=1,
        )  # fmt: skip
        ax.barh(
            range(len(rows)), sizes, left=measured_ends, height=_MEASURED_HEIGHT, color=PART_COLORS[field], label=name,
            gid="measured", zorder=2,
        )  # fmt: skip
        measured_ends = [end + size for end, size in zip(measured_ends, sizes, strict=True)]
        planned_ends = [end + size for end, size in zip(planned_ends, outlines, strict=True)]


def _annotate_bars(ax: Axes, rows: Sequence[MemoryRow], unit_size: float, *, show_limits: bool) -> None:
    """Write the numbers next to the bars, and draw the limits if asked."""
    for y, row in enumerate(rows):
        limit = row.limit if show_limits else None
        planned = row.planned.needed if row.planned is not None else None
        text = formatting.format_bytes(row.peak) if row.peak is not None else "no step yet"
        text += f" (planned {formatting.format_bytes(planned)})" if planned is not None else ""
        is_over_limit = row.limit is not None and row.total > row.limit
        style.write_beside(
            ax, text, max(row.total, planned or 0, limit or 0) / unit_size, y,
            color=style.ALERT_COLOR if is_over_limit else style.TEXT_COLOR,
        )  # fmt: skip
        if limit is not None:
            ends = [y - _LIMIT_HALF_HEIGHT, y + _LIMIT_HALF_HEIGHT]
            ax.plot([limit / unit_size] * 2, ends, color=style.TEXT_COLOR, linewidth=2.2, gid="limit", zorder=3)

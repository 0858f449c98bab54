"""The figure of a call of the user's function: the logged values over the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.text.call_text import LogSummary, format_headline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.dashboard.run_view import CallView

_MAX_AXES_PER_ROW = 3
_MIN_LINE_POINTS = 3  # fewer points are drawn as dots


def draw_call(call: CallView) -> Figure:
    """Draw axes for each logged name, with a line for each rank."""
    rows = list(call.rows)
    names = list(LogSummary().update(rows).names)
    num_columns = max(1, min(_MAX_AXES_PER_ROW, len(names)))
    num_rows = max(1, -(-len(names) // num_columns))
    figure = create_figure(4.6 * num_columns, 3.2 * num_rows)
    style.set_figure_title(figure, format_headline(call))
    if not names:
        figure.text(0.5, 0.5, "nothing logged yet", ha="center", va="center", color=style.TEXT_COLOR)
    for number, name in enumerate(names, 1):
        _draw_logged_value(figure.add_subplot(num_rows, num_columns, number), name, rows, call.world_size)
    return figure


def _draw_logged_value(ax: Axes, name: str, rows: Sequence[dict[str, Any]], num_ranks: int) -> None:
    """Draw one logged name, with a legend as long as colors distinguish the ranks."""
    points: dict[int, tuple[list[int], list[float]]] = {rank: ([], []) for rank in range(num_ranks)}
    for row in rows:
        if name in row:
            points[row["rank"]][0].append(row["index"])
            points[row["rank"]][1].append(row[name])
    for rank, (indices, values) in points.items():
        if values:
            marker = "o" if len(values) < _MIN_LINE_POINTS else ""
            color = style.COLORS[rank % len(style.COLORS)]
            ax.plot(indices, values, color=color, marker=marker, markersize=4, linewidth=1.3, label=f"node {rank}")
    style.style_axes(ax)
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=style.TEXT_COLOR, parse_math=False)
    ax.set_xlabel("row", fontsize=8, color=style.MUTED_COLOR)
    if num_ranks <= len(style.COLORS):
        ax.legend(frameon=False, fontsize=8, labelcolor=style.TEXT_COLOR)

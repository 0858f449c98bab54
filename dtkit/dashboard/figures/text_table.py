"""A table of text in axes: columns as wide as their cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.transforms import blended_transform_factory

from dtkit.dashboard.figures import style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from dtkit._util.table import Table

_GAP_CHARS = 2
_MIN_COLUMN_CHARS = 4
_MAX_CHAR_WIDTH = 0.018  # of the figure's width: a short table is not torn apart


LEFT, RIGHT = 0.015, 0.985
"""Edges of texts, as shares of the figure's width: they need the room beside the axes."""


def prepare_axes(ax: Axes, num_lines: float, title: str = "", note: str = "") -> None:
    """Prepare axes for `num_lines` lines of text under a title, which are as wide as the figure."""
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(num_lines + (1.2 if title else 0), 0))
    if title:
        write(ax, LEFT, 0.5, title, style.TEXT_COLOR, fontsize=10, fontweight="bold", gid="name")
        write(ax, RIGHT, 0.5, note, style.MUTED_COLOR, ha="right", gid="note")


def write(ax: Axes, x: float, y: float, text: str, color: str, **text_style: Any) -> None:
    """Write text at `x`, a share of the figure's width, and at line `y` of the axes."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    transform = blended_transform_factory(figure.transFigure, ax.transData)
    defaults: dict[str, Any] = {"fontsize": 8, "va": "center", "gid": "cell", "parse_math": False}
    ax.text(x, y, text, transform=transform, color=color, in_layout=False, **(defaults | text_style))


def draw_table(ax: Axes, title: str, note: str, table: Table, notes: Sequence[str] = ()) -> None:
    """Draw a table across the figure, and `notes` below it. Rows whose first cell is not a number are alerts."""
    lines = [table.header, *table.rows]
    prepare_axes(ax, len(lines) + len(notes), title, note)
    widths = [max(_MIN_COLUMN_CHARS, *(len(line[k]) for line in lines)) + _GAP_CHARS for k in range(len(table.header))]
    scale = min((RIGHT - LEFT) / sum(widths), _MAX_CHAR_WIDTH)
    left = LEFT
    for column, (name, width) in enumerate(zip(table.header, widths, strict=True)):
        is_text = name in table.text_columns
        for row, line in enumerate(lines):
            is_alert = row > 0 and not line[0].isdigit()
            color = style.ALERT_COLOR if is_alert else style.TEXT_COLOR if row else style.MUTED_COLOR
            x = left if is_text else left + (width - _GAP_CHARS) * scale
            write(ax, x, row + 1.7, line[column], color, ha="left" if is_text else "right")
        left += width * scale
    for row, text in enumerate(notes, len(lines)):
        write(ax, LEFT, row + 1.7, text, style.MUTED_COLOR)

"""A square for each of many nodes: dark if fast, with a sign if slow or lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle

from dtkit.dashboard.figures import style
from dtkit.dashboard.summary.metrics import compute_run_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.dashboard.summary.metrics import RunMetrics
    from dtkit.history.history import History

_FEW_NODES, _FEW_COLUMNS, _MANY_COLUMNS = 64, 16, 32  # only few squares in a row have room for numbers
_PALE_COLOR, _FULL_COLOR = np.array([0.87, 0.93, 0.97]), np.array([0.0, 0.447, 0.698])


def draw(ax: Axes, history: History) -> None:
    """Draw the throughput without waiting, from half of the median (pale) to the median (full color)."""
    ranks = history.num_ranks
    metrics = compute_run_metrics(history, ranks)
    style.set_title(ax, "Nodes at a glance", "samples/s without waiting · ▲ keeps the others waiting · ✕ lost")
    ax.set_axis_off()
    rates = metrics.by_rank[:, 1]
    median = float(np.nanmedian(rates)) if np.isfinite(rates).any() else 0.0
    for rank, rate in enumerate(rates):
        level = float(np.clip(2 * rate / median - 1, 0, 1)) if median and np.isfinite(rate) else 0.0
        _draw_square(ax, rank, level, _get_sign(metrics, rank), _count_columns(ranks))
    ax.set(xlim=(0, _count_columns(ranks)), ylim=(count_rows(ranks), 0))


def count_rows(num_ranks: int) -> int:
    """Return the number of rows of squares."""
    return max(1, -(-num_ranks // _count_columns(num_ranks)))


def _count_columns(num_ranks: int) -> int:
    return _FEW_COLUMNS if num_ranks <= _FEW_NODES else _MANY_COLUMNS


def _get_sign(metrics: RunMetrics, rank: int) -> str:
    if rank in metrics.lost_nodes:
        return "✕"
    straggler = metrics.timing.straggler
    return "▲" if straggler is not None and rank in straggler.ranks else ""


def _draw_square(ax: Axes, rank: int, level: float, sign: str, num_columns: int) -> None:
    row, column = divmod(rank, num_columns)
    ink = "white" if level > 0.5 else style.TEXT_COLOR
    face = "white" if sign == "✕" else tuple(_PALE_COLOR + (_FULL_COLOR - _PALE_COLOR) * level)
    edge, dashes = (style.ALERT_COLOR, "--" if sign == "✕" else "-") if sign else ("white", "-")
    square = Rectangle(
        (column + 0.05, row + 0.07), 0.9, 0.86, facecolor=face, edgecolor=edge, linestyle=dashes,
        linewidth=1.4 if sign else 0.5, gid=f"node-{rank}",
    )  # fmt: skip
    ax.add_patch(square)
    color = style.ALERT_COLOR if sign == "✕" else ink
    text = sign or (str(rank) if num_columns == _FEW_COLUMNS else "")
    ax.text(column + 0.5, row + 0.52, text, ha="center", va="center", fontsize=8, color=color)

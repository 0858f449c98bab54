"""Many nodes at a glance: a square each, dark where it is fast, with a sign where something is the matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle

from dtkit.dashboard import axes
from dtkit.dashboard.glance import glance

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.dashboard.glance import Glance
    from dtkit.history.history import History

ACROSS = 32
"""Squares in a row."""

_PALE, _FULL = np.array([0.87, 0.93, 0.97]), np.array([0.0, 0.447, 0.698])


def draw(ax: Axes, history: History) -> None:
    """Draw the panel: throughput without waiting, from half of the median (pale) to all of it (full)."""
    ranks = max(history.ranks, default=-1) + 1
    now = glance(history, ranks)
    axes.title(ax, "Nodes at a glance", "samples/s without waiting · ▲ keeps the others waiting · ✕ lost")
    ax.set_axis_off()
    rates = now.by_rank[:, 1]
    median = float(np.nanmedian(rates)) if np.isfinite(rates).any() else 0.0
    for rank, rate in enumerate(rates):
        level = float(np.clip(2 * rate / median - 1, 0, 1)) if median and np.isfinite(rate) else 0.0
        _square(ax, rank, level, _sign(now, rank))
    across = min(ranks, ACROSS) or 1
    ax.set(xlim=(0, max(across, ACROSS)), ylim=(-(-ranks // ACROSS) or 1, 0))


def rows(ranks: int) -> int:
    """How many rows of squares there are."""
    return max(1, -(-ranks // ACROSS))


def _sign(now: Glance, rank: int) -> str:
    slow = now.timing.straggler is not None and rank in now.timing.straggler.ranks
    return "✕" if rank in now.lost else "▲" if slow else ""


def _square(ax: Axes, rank: int, level: float, sign: str) -> None:
    row, column = divmod(rank, ACROSS)
    ink = "white" if level > 0.5 else axes.INK
    face = "white" if sign == "✕" else tuple(_PALE + (_FULL - _PALE) * level)
    edge, style = (axes.ALERT, "--" if sign == "✕" else "-") if sign else ("white", "-")
    square = Rectangle(
        (column + 0.05, row + 0.07), 0.9, 0.86, facecolor=face, edgecolor=edge, linestyle=style,
        linewidth=1.4 if sign else 0.5, gid=f"node-{rank}",
    )  # fmt: skip
    ax.add_patch(square)
    colour = axes.ALERT if sign == "✕" else ink
    ax.text(column + 0.5, row + 0.52, sign or str(rank), ha="center", va="center", fontsize=6.5, color=colour)

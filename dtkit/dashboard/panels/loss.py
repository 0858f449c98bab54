"""Loss per node and over all nodes, with the validation points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard import axes, spotlight
from dtkit.dashboard.series import BUDGET, LOSS, layouts, sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History

_MANY_POINTS = 20  # of more validation points some are drawn, and a line joins all: a chain would hide the lines


def draw(ax: Axes, history: History) -> None:
    """Draw the panel."""
    ranks = max(history.ranks, default=-1) + 1
    (layout,) = layouts([LOSS], ranks)
    axes.draw_lines(ax, sample(history, LOSS, ranks), layout, "mean")
    spotlight.draw_outliers(ax, history, LOSS, ranks, BUDGET)
    axes.title(ax, "Loss", axes.lines_note(layout))
    points = [(e.step, e.values["loss"]) for e in history.evaluations if "loss" in e.values]
    points = [(step, value) for step, value in points if np.isfinite(value)]
    if points:
        many = len(points) > _MANY_POINTS
        every = -(-len(points) // _MANY_POINTS)
        ax.plot(
            *zip(*points, strict=True), "D-" if many else "D", color=axes.INK, linewidth=0.8, markerfacecolor="white",
            markersize=4 if many else 5, markevery=((len(points) - 1) % every, every), gid="valid",
        )  # fmt: skip
        axes.end_labels(ax, [*axes.labels_of(ax), ("valid", points[-1][1], axes.INK)])
    axes.mark_events(ax, history.events)

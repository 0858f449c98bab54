"""Loss per node and over all nodes, with the validation points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.figures import style
from dtkit.dashboard.summary import node_series
from dtkit.dashboard.summary.curves import LOSS, MAX_BUCKETS, downsample, make_chart_layouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History

_MAX_VALIDATION_MARKERS = (
    20  # of more validation points some are drawn, and a line joins all: a chain would hide the lines
)


def draw(ax: Axes, history: History) -> None:
    """Draw the panel."""
    ranks = max(history.ranks, default=-1) + 1
    (layout,) = make_chart_layouts([LOSS], ranks)
    style.draw_lines(ax, downsample(history, LOSS, ranks), layout, "mean")
    node_series.draw_history_outliers(ax, history, LOSS, ranks, MAX_BUCKETS)
    style.set_title(ax, "Loss", style.describe_lines(layout))
    points = [(e.step, e.values["loss"]) for e in history.evaluations if "loss" in e.values]
    points = [(step, value) for step, value in points if np.isfinite(value)]
    if points:
        many = len(points) > _MAX_VALIDATION_MARKERS
        every = -(-len(points) // _MAX_VALIDATION_MARKERS)
        ax.plot(
            *zip(*points, strict=True), "D-" if many else "D", color=style.TEXT_COLOR, linewidth=0.8, markerfacecolor="white",
            markersize=4 if many else 5, markevery=((len(points) - 1) % every, every), gid="valid",
        )  # fmt: skip
        style.draw_end_labels(ax, [*style.collect_line_labels(ax), ("valid", points[-1][1], style.TEXT_COLOR)])
    style.mark_events(ax, history.events)

"""Validations of a number as points in the chart of its training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History

_MAX_MARKERS = 12  # more markers would hide the lines


def list_validation_points(history: History, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of each finite validation of a number."""
    points = [(e.step, e.values[name]) for e in history.evaluations if name in e.values]
    return [(step, float(value)) for step, value in points if value is not None and np.isfinite(value)]


def draw_validation(ax: Axes, history: History, name: str) -> np.ndarray:
    """Draw validations as points, and return their values. Many points get a line, and some of them a marker."""
    points = list_validation_points(history, name)
    if not points:
        return np.empty(0)
    has_line = len(points) > _MAX_MARKERS
    marker_step = -(-len(points) // _MAX_MARKERS)
    ax.plot(
        *zip(*points, strict=True), "D-" if has_line else "D", color=style.TEXT_COLOR, linewidth=0.8,
        markerfacecolor="white", markersize=4 if has_line else 5,
        markevery=((len(points) - 1) % marker_step, marker_step), gid="validation", label="_", clip_on=False,
    )  # fmt: skip
    style.draw_end_labels(ax, style.collect_line_labels(ax))  # the points may have changed the limits
    return np.array([value for _, value in points])

"""Loss per node and over all nodes, with the validation points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.event_marks import mark_events
from dtkit.dashboard.summary.curves import LOSS, MAX_BUCKETS, downsample, make_chart_layouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History

_MAX_VALIDATION_MARKERS = 12  # more markers would hide the lines
_MAX_VALUE_CHARS = 7  # of the mean at the line's end, as in the live view


def draw(ax: Axes, history: History, *, has_value: bool = False) -> None:
    """Draw the panel. With `has_value` the mean has its last value at the line's end, as in the live view."""
    ranks = history.num_ranks
    (layout,) = make_chart_layouts([LOSS], ranks)
    buckets = downsample(history, LOSS, ranks)
    value = formatting.format_loss(style.get_last_value(buckets))
    style.draw_lines(ax, buckets, layout, f"mean {value}" if has_value and len(value) <= _MAX_VALUE_CHARS else "mean")
    style.scale_by_span(ax, buckets)
    style.draw_outliers(ax, history, LOSS, MAX_BUCKETS)
    validation = _draw_validation(ax, history)
    style.leave_out_single_small_values(ax, [*buckets.values[..., 1].T, validation])
    notes = [style.describe_lines(layout), "◇ validation" if len(validation) else ""]
    style.set_title(ax, "Loss", ", ".join(filter(None, notes)))
    mark_events(ax, history.events)


def _draw_validation(ax: Axes, history: History) -> np.ndarray:
    """Draw validation losses as points, and return them. Many points get a line, and some of them a marker."""
    points = [
        (evaluation.step, evaluation.values["loss"])
        for evaluation in history.evaluations
        if "loss" in evaluation.values
    ]
    points = [(step, loss) for step, loss in points if np.isfinite(loss)]
    if not points:
        return np.empty(0)
    has_line = len(points) > _MAX_VALIDATION_MARKERS
    marker_step = -(-len(points) // _MAX_VALIDATION_MARKERS)
    ax.plot(
        *zip(*points, strict=True), "D-" if has_line else "D", color=style.TEXT_COLOR, linewidth=0.8,
        markerfacecolor="white", markersize=4 if has_line else 5,
        markevery=((len(points) - 1) % marker_step, marker_step), gid="validation", label="_", clip_on=False,
    )  # fmt: skip
    style.draw_end_labels(ax, style.collect_line_labels(ax))  # the points may have changed the limits
    return np.array([loss for _, loss in points])

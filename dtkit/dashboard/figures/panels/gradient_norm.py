"""The norm of each step's gradient, reduced over the nodes and before clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.event_marks import mark_events
from dtkit.dashboard.summary.curves import GRAD_NORM, downsample, make_chart_layouts
from dtkit.dashboard.summary.value_scale import lift_bands

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History


def draw(ax: Axes, history: History) -> None:
    """Draw the panel; spikes are kept as a band."""
    ranks = history.num_ranks
    (layout,) = make_chart_layouts([GRAD_NORM], ranks)
    part = lift_bands(downsample(history, GRAD_NORM, ranks))
    style.draw_lines(ax, part, layout, formatting.format_loss(style.get_last_value(part)))
    style.draw_band(ax, part.middle_steps, part.values[:, -1], style.TEXT_COLOR, 0.14)
    style.scale_by_span(ax, part)
    style.leave_out_single_small_values(ax, part.values[..., 1].T)
    style.set_title(ax, "Gradient norm", "over all nodes, before clipping")
    mark_events(ax, history.events)


def has_gradient_norm(history: History) -> bool:
    """Return whether the norm of the gradient was measured."""
    return bool(np.isfinite(history.totals()["grad_norm"]).any())

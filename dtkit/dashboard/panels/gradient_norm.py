"""The norm of each step's gradient, reduced over the nodes and before clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard import axes
from dtkit.dashboard.series import GRAD_NORM, layouts, sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History


def draw(ax: Axes, history: History) -> None:
    """Draw the panel; spikes are kept as a band."""
    ranks = max(history.ranks, default=-1) + 1
    (layout,) = layouts([GRAD_NORM], ranks)
    part = sample(history, GRAD_NORM, ranks)
    axes.draw_lines(ax, part, layout, formatting.loss(axes.last(part)))
    axes.draw_band(ax, part.steps, part.values[:, -1], axes.INK, 0.14)
    axes.title(ax, "Gradient norm", "over all nodes, before clipping")
    axes.mark_events(ax, history.events)


def known(history: History) -> bool:
    """Whether any rank knows its gradient's norm."""
    return bool(np.isfinite(history.totals()["grad_norm"]).any())

"""The learning rate of the first parameter group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard import axes
from dtkit.dashboard.series import LR, layouts, sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History


def draw(ax: Axes, history: History) -> None:
    """Draw the panel."""
    ranks = max(history.ranks, default=-1) + 1
    (layout,) = layouts([LR], ranks)
    part = sample(history, LR, ranks)
    axes.draw_lines(ax, part, layout, f"{axes.last(part):.3g}")
    ax.set_ylim(bottom=0)
    axes.end_labels(ax, axes.labels_of(ax))
    axes.title(ax, "Learning rate", "the same on all nodes")
    axes.mark_events(ax, history.events)


def changed(history: History) -> bool:
    """Whether there is more to see than one number."""
    rates = history.column("lr")
    return bool(len(rates) and np.ptp(rates) > 0)

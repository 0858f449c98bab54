"""Samples per second per node while it does not wait, and of all nodes together divided by the replicas of the model.

Nodes that train in step take equally long for a step; what tells them apart is how long each would need alone. Nodes
that share one replica (the stages of a pipeline, the slices of a layer) take the same samples, which count once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter

from dtkit._util import formatting
from dtkit.dashboard import axes, spotlight
from dtkit.dashboard.series import THROUGHPUT, layouts, overall_rate, sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History

SMOOTH = 64  # points: single steps of a few milliseconds say more of the scheduler than of the training


def draw(ax: Axes, history: History) -> None:
    """Draw the panel."""
    ranks = max(history.ranks, default=-1) + 1
    (layout,) = layouts([THROUGHPUT], ranks)
    part = sample(history, THROUGHPUT, ranks, SMOOTH)
    now = history.totals(history.num_steps - 1)["ranks"]
    left = int(now[-1]) if len(now) else ranks
    axes.draw_lines(ax, part, layout, overall_rate(left, history.ranks_per_replica, ranks))
    spotlight.draw_outliers(ax, history, THROUGHPUT, ranks, SMOOTH)
    axes.title(ax, "Throughput", axes.lines_note(layout, _unit(ranks, banded=layout.banded)))
    if np.isfinite(part.values).any():
        ax.set_ylim(0, 1.08 * float(np.nanmax(part.values)))
        axes.end_labels(ax, axes.labels_of(ax))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: formatting.rate(y) if y else "0"))
    axes.mark_events(ax, history.events)


def _unit(ranks: int, *, banded: bool) -> str:
    """What the axis counts; short where the note has more to say."""
    return "samples/s without waiting" if ranks > 1 and not banded else "samples/s"

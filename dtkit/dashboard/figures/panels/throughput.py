"""Samples per second per node while it does not wait, and of all nodes together divided by the replicas of the model.

Nodes that train in step take equally long for a step; what tells them apart is how long each would need alone. Nodes
that share one replica (the stages of a pipeline, the slices of a layer) take the same samples, which count once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.summary import node_series
from dtkit.dashboard.summary.curves import THROUGHPUT, downsample, format_overall_label, make_chart_layouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History

NUM_BUCKETS = 64  # points: single steps of a few milliseconds say more of the scheduler than of the training


def draw(ax: Axes, history: History) -> None:
    """Draw the panel."""
    ranks = max(history.ranks, default=-1) + 1
    (layout,) = make_chart_layouts([THROUGHPUT], ranks)
    part = downsample(history, THROUGHPUT, ranks, NUM_BUCKETS)
    now = history.totals(history.num_steps - 1)["ranks"]
    left = int(now[-1]) if len(now) else ranks
    style.draw_lines(ax, part, layout, format_overall_label(left, history.ranks_per_replica, ranks))
    node_series.draw_history_outliers(ax, history, THROUGHPUT, ranks, NUM_BUCKETS)
    style.set_title(ax, "Throughput", style.describe_lines(layout, _describe_unit(ranks, banded=layout.banded)))
    if np.isfinite(part.values).any():
        ax.set_ylim(0, 1.08 * float(np.nanmax(part.values)))
        style.draw_end_labels(ax, style.collect_line_labels(ax))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: formatting.format_rate(y) if y else "0"))
    style.mark_events(ax, history.events)


def _describe_unit(num_ranks: int, *, banded: bool) -> str:
    """What the axis counts; short where the note has more to say."""
    return "samples/s without waiting" if num_ranks > 1 and not banded else "samples/s"

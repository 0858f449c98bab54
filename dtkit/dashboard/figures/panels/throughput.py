"""Samples per second of each node without its waiting time, and with it on average: of all nodes, by replica.

Nodes in step take equally long for a step, and differ only in the time without waiting. Nodes that share a replica,
such as the stages of a pipeline, take the same samples, which count once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.event_marks import mark_events
from dtkit.dashboard.summary.curves import THROUGHPUT, downsample, format_overall_label, make_chart_layouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History

NUM_BUCKETS = 64  # single steps of a few milliseconds show the scheduler's noise


def draw(ax: Axes, history: History) -> None:
    """Draw the panel."""
    ranks = history.num_ranks
    (layout,) = make_chart_layouts([THROUGHPUT], ranks)
    buckets = downsample(history, THROUGHPUT, ranks).merge_to_quantiles(NUM_BUCKETS, int(layout.banded)).invert()
    last_ranks = history.totals(history.num_steps - 1)["ranks"]
    num_current = int(last_ranks[-1]) if len(last_ranks) else ranks
    overall_name = format_overall_label(num_current, history.ranks_per_replica, ranks)
    style.draw_lines(ax, buckets, layout, overall_name, name_is_noted=not layout.banded)
    style.draw_outliers(ax, history, THROUGHPUT, NUM_BUCKETS, is_inverted=True)
    style.set_title(ax, "Throughput", style.describe_lines(layout, "samples/s"))
    if np.isfinite(buckets.values).any():
        ax.set_ylim(bottom=0)
        style.draw_end_labels(ax, style.collect_line_labels(ax))
    notes = [f"┅ {overall_name}"] if layout.nodes > 1 else []  # a mean of many nodes has its name at its end
    notes += [f"band{'s' * (layout.nodes > 1)}: 10 to 90 %"] if buckets.width > 1 else []
    ax.set_xlabel(", ".join(["step", *notes]), fontsize=8, color=style.MUTED_COLOR)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: formatting.format_rate(y) if y else "0"))
    mark_events(ax, history.events)

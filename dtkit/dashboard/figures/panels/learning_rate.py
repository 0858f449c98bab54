"""The learning rate of the first parameter group."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.event_marks import mark_events
from dtkit.dashboard.summary.curves import LR, downsample, make_chart_layouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.dashboard.summary.curves import CurveBuckets
    from dtkit.history.history import History


def draw(ax: Axes, history: History) -> None:
    """Draw the panel."""
    ranks = history.num_ranks
    (layout,) = make_chart_layouts([LR], ranks)
    part = _hold_rates(downsample(history, LR, ranks))
    style.draw_lines(ax, part, layout, formatting.format_learning_rate(style.get_last_value(part)))
    for line in ax.get_lines():
        line.set_drawstyle("steps-mid")  # it is set from one step to the next
    ax.set_ylim(bottom=0)
    style.draw_end_labels(ax, style.collect_line_labels(ax))
    style.set_title(ax, "Learning rate", f"{_describe_last(history)}the same on all nodes")
    mark_events(ax, history.events)


def _hold_rates(part: CurveBuckets) -> CurveBuckets:
    """Give a bucket amid which the rate changed the one that it changed to, instead of a mean that never was."""
    values = part.values.copy()
    for (_, before, _), bucket in itertools.pairwise(values[:, 0]):
        low, _, high = bucket
        if low < high and np.isfinite(before):
            bucket[1] = high if abs(high - before) > abs(low - before) else low
    return dataclasses.replace(part, values=values)


def _describe_last(history: History) -> str:
    """Return the first step of the last rate, which is at the line's end.

    Next to a far larger rate, a step from a small one to 0 can't be seen.
    """
    rows = history.read_valid_rows()
    rows = rows[rows["rank"] == rows["rank"].min(initial=0)]
    changes = np.flatnonzero(np.diff(rows["lr"])) + 1
    if not len(changes) or len(rows) - changes[-1] < 2:
        return ""
    return f"since step {rows['step'][changes[-1]]:,}, "


def has_lr_changes(history: History) -> bool:
    """Return whether the learning rate changes."""
    rates = history.column("lr")
    return bool(len(rates) and np.ptp(rates) > 0)

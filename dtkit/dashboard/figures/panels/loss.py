"""Loss per node and over all nodes, with the validation points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.event_marks import mark_events
from dtkit.dashboard.figures.validation_points import draw_validation
from dtkit.dashboard.summary.curves import LOSS, MAX_BUCKETS, downsample, make_chart_layouts
from dtkit.dashboard.summary.value_scale import lift_bands

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.history.history import History

_MAX_VALUE_CHARS = 7  # of the mean at the line's end, as in the live view


def draw(ax: Axes, history: History, *, mean: str = "") -> None:
    """Draw the panel. `mean` is the mean loss of the tiles, which is at the line's end as in the live view."""
    ranks = history.num_ranks
    (layout,) = make_chart_layouts([LOSS], ranks)
    buckets = lift_bands(downsample(history, LOSS, ranks))
    style.draw_lines(ax, buckets, layout, f"mean {mean}".rstrip() if len(mean) <= _MAX_VALUE_CHARS else "mean")
    style.scale_by_span(ax, buckets)
    style.draw_outliers(ax, history, LOSS, MAX_BUCKETS)
    validation = draw_validation(ax, history, "loss")
    style.leave_out_single_small_values(ax, [*buckets.values[..., 1].T, validation])
    notes = [style.describe_lines(layout), "◇ validation" if len(validation) else ""]
    style.set_title(ax, "Loss", ", ".join(filter(None, notes)))
    mark_events(ax, history.events)

"""A panel for each validation metric besides the loss, and those that the panel of a logged number has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.event_marks import mark_events
from dtkit.dashboard.figures.panels import scalars
from dtkit.dashboard.figures.validation_points import list_validation_points
from dtkit.dashboard.summary.series_names import MAX_TITLE_CHARS

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    from dtkit.history.history import History

_MAX_PANELS = 6
_MAX_MARKERS = 20  # more markers would hide the line


def make_panels(history: History) -> list[Callable[[Axes, History], None]]:
    """Return the panels, in the order in which the metrics were given."""
    names = dict.fromkeys(name for evaluation in history.evaluations for name in evaluation.values if name != "loss")
    logged = scalars.list_names(history)
    with_numbers = [name for name in names if name not in logged and list_validation_points(history, name)]
    return [functools.partial(draw, name=name) for name in with_numbers[:_MAX_PANELS]]


def draw(ax: Axes, history: History, *, name: str) -> None:
    """Draw the values of one metric."""
    points = list_validation_points(history, name)
    steps, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    marker_step = -(-len(points) // _MAX_MARKERS)
    ax.plot(
        steps, values, "D-", color=style.TEXT_COLOR, linewidth=1.2, markerfacecolor="white", markersize=4,
        markevery=((len(points) - 1) % marker_step, marker_step), gid=f"metric {name}", clip_on=False,
    )  # fmt: skip
    style.style_axes(ax)
    style.format_step_axis(ax)
    style.show_all_steps(ax, history)
    last, low, high = (formatting.format_loss(float(value)) for value in (values[-1], values.min(), values.max()))
    style.set_title(ax, formatting.sanitize_text(name, MAX_TITLE_CHARS), f"last {last}, from {low} to {high}")
    mark_events(ax, history.events)

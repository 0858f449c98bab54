"""A panel for each number that the user logged in a training: each node's line, the mean over all, and validations."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.event_marks import mark_events
from dtkit.dashboard.figures.validation_points import draw_validation
from dtkit.dashboard.summary.curves import MAX_NODE_LINES
from dtkit.dashboard.summary.series_names import is_system_name, split_unit
from dtkit.dashboard.summary.value_scale import spans_orders_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    from dtkit.history.history import History

_MAX_PANELS = 8
_MAX_POINTS = 256
_ROOM = 1.08  # above the largest value


def make_panels(history: History) -> list[Callable[[Axes, History], None]]:
    """Return the panels, in the order in which the names were first logged."""
    return [functools.partial(draw, name=name) for name in list_names(history)]


def list_names(history: History) -> list[str]:
    """Return the names that have a panel."""
    return [name for name in history.scalar_names if has_numbers(history, name)][:_MAX_PANELS]


def has_numbers(history: History, name: str) -> bool:
    """Return whether some values of a name can be drawn."""
    return bool(np.isfinite(history.scalar(name)[1]).any())


def draw(ax: Axes, history: History, *, name: str) -> None:
    """Draw the values of one name."""
    style.style_axes(ax)
    style.format_step_axis(ax)
    ranks = history.ranks
    if 1 < len(ranks) <= MAX_NODE_LINES:
        for rank in ranks:
            color = style.COLORS[rank % len(style.COLORS)]
            ax.plot(
                *_thin_out(*history.scalar(name, rank)),
                color=color,
                label=f"node {rank}",
                gid=f"node {rank}",
                **style.PART_LINE,
            )
    steps, values = history.scalar(name)
    ax.plot(
        *_thin_out(steps, values), color=style.TEXT_COLOR, label="mean" if len(ranks) > 1 else "_",
        gid=f"scalar {name}", **style.MEAN_LINE,
    )  # fmt: skip
    validation = draw_validation(ax, history, name)
    style.show_all_steps(ax, history)
    if is_system_name(name):
        ax.set_ylim(0, _ROOM * float(ax.dataLim.ymax) or 1.0)  # a line along the upper end would be cut
    elif spans_orders_of([values]):  # as in the live view
        ax.set_yscale("log")
        style.format_log_axis(ax.yaxis, formatting.format_loss)
        style.leave_out_single_small_values(ax, [values])
    style.draw_end_labels(ax, style.collect_line_labels(ax))
    known = values[np.isfinite(values)]
    last, low, high = (formatting.format_loss(float(value)) for value in (known[-1], known.min(), known.max()))
    title, unit = split_unit(name)
    further = f"◇ validation {formatting.format_loss(validation[-1])}" if len(validation) else f"from {low} to {high}"
    style.set_title(ax, f"{title} ({unit})" if unit else title, f"last {last}, {further}")
    mark_events(ax, history.events)


def _thin_out(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most ``_MAX_POINTS`` points, each the mean over as many neighbors."""
    width = -(-len(steps) // _MAX_POINTS)
    if width <= 1:
        return steps, values
    first = np.arange(0, len(steps), width)
    count = np.diff(np.append(first, len(steps)))
    return np.add.reduceat(steps.astype("f8"), first) / count, np.add.reduceat(values, first) / count

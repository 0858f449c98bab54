"""The charts of a run that a saved notebook keeps: a figure each, so that a page has as many in a row as fit."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.figures.panels import (
    gradient_norm,
    learning_rate,
    loss,
    memory,
    metrics,
    scalars,
    step_time,
    throughput,
    waffle,
)
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.figures.run_figure import wrap_custom_panels
from dtkit.dashboard.figures.style import fit_texts, lay_out
from dtkit.dashboard.summary.curves import MAX_NODE_LINES
from dtkit.history.mean_loss import read_final_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.dashboard.figures.run_figure import Panel
    from dtkit.dashboard.run_view import RunView

# Texts of 8 points are 10 pixels high in a window of 600 px, and 13 in a wide one, which has two charts in a row.
_WIDTH_IN, _HEIGHT_IN, _LOW_HEIGHT_IN = 5.2, 2.4, 1.75
_BAR_HEIGHT_IN, _NUM_BARS_OF_MANY = 0.27, 3
_LEAST_WIDTH = 0.6  # of aligned axes, as a part of the figure's


def draw_run_charts(run: RunView, mean_loss: str | None = None) -> list[Figure]:
    """Draw what a saved notebook keeps of a run, the loss first. A run without steps has no charts.

    `mean_loss` is that of the words around the charts: a run that goes on soon has another one.
    """
    if not len(run.history):
        return []
    mean_loss = formatting.format_loss(read_final_loss(run.history)) if mean_loss is None else mean_loss
    figures = [_draw_chart(run, panel, height) for panel, height in _list_panels(run, mean_loss)]
    _align([ax for figure in figures for ax in figure.axes])
    for figure in figures:
        fit_texts(figure)  # which depends on the room that is left
    return figures


def _draw_chart(run: RunView, panel: Panel, height: float) -> Figure:
    figure = create_figure(_WIDTH_IN, height)
    panel(figure.add_subplot(), run.history)
    lay_out(figure)
    figure.set_layout_engine("none")  # its axes are aligned with those of other charts
    return figure


def _align(all_axes: Sequence[Axes]) -> None:
    """Give all axes the same left and right edge, as cards in a column are read together."""
    boxes = [ax.get_position() for ax in all_axes]
    left, right = max((box.x0 for box in boxes), default=0.0), min((box.x1 for box in boxes), default=1.0)
    if right - left < _LEAST_WIDTH:
        return  # a panel of the user's own may be anything
    for ax, box in zip(all_axes, boxes, strict=True):
        ax.set_position((left, box.y0, right - left, box.height))


def _list_panels(run: RunView, mean_loss: str) -> list[tuple[Panel, float]]:
    """Return the panels with their heights in inches: two of one height are in a row of a wide page."""
    draw_loss = functools.partial(loss.draw, mean=mean_loss)  # a chart of its own has the room
    panels: list[tuple[Panel, float]] = [(draw_loss, _HEIGHT_IN), (throughput.draw, _HEIGHT_IN), *_list_low_panels(run)]
    panels.append((step_time.draw, 1.25 + _BAR_HEIGHT_IN * _count_bars(run)))
    panels += [(panel, _HEIGHT_IN) for panel in wrap_custom_panels()]
    if run.nodes and not memory.is_ample(run.history, run.nodes):  # else the words have it
        panels.append((memory.make_panel(run.nodes), 0.7 + _BAR_HEIGHT_IN * _count_bars(run)))
    return list(_match_heights(panels))


def _match_heights(panels: Sequence[tuple[Panel, float]]) -> Iterator[tuple[Panel, float]]:
    """Give both panels of a row the larger height of the two."""
    for k, (panel, height) in enumerate(panels):
        row = panels[k - k % 2 : k - k % 2 + 2]
        yield panel, max(height, *(other for _, other in row))


def _list_low_panels(run: RunView) -> Iterator[tuple[Panel, float]]:
    history = run.history
    if run.spec.world_size > MAX_NODE_LINES:
        yield waffle.draw, 0.55 + 0.27 * waffle.count_rows(run.spec.world_size)
    if learning_rate.has_lr_changes(history):  # else the notices have it
        yield learning_rate.draw, _LOW_HEIGHT_IN
    if gradient_norm.has_gradient_norm(history):
        yield gradient_norm.draw, _LOW_HEIGHT_IN
    for panel in [*metrics.make_panels(history), *scalars.make_panels(history)]:
        yield panel, _LOW_HEIGHT_IN


def _count_bars(run: RunView) -> int:
    ranks = run.spec.world_size
    return ranks if ranks <= MAX_NODE_LINES else _NUM_BARS_OF_MANY

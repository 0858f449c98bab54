"""The figure of several runs: loss against steps, time and bytes, each validation metric, and logged numbers.

Runs differ by color, by the dashes of their lines, and by their markers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.summary.comparison import (
    describe_exits,
    differ_in_bytes,
    downsample_losses,
    end_line,
    find_exits,
    find_loss_cap,
    find_metric_cap,
    join_directions,
    list_shared_scalars,
    make_row,
    read_scalar,
)
from dtkit.dashboard.summary.equal_lines import choose_turn, find_turns
from dtkit.dashboard.summary.run_lines import choose_dash
from dtkit.dashboard.summary.series_names import MAX_TITLE_CHARS
from dtkit.dashboard.summary.short_batches import compute_drawn_losses
from dtkit.dashboard.summary.value_scale import is_steep, spans_orders_of
from dtkit.history.metric_direction import is_better_lower
from dtkit.history.speed import read_step_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.dashboard.summary.curves import CurveBuckets
    from dtkit.history.history import History

_LINE_STYLES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
_LOG_BYTES_RATIO = 20.0  # from this ratio of bytes on, a linear axis would hide the smaller ones
_WIDTH_IN, _ROW_HEIGHT_IN, _LEGEND_LINE_IN = 5.3, 2.3, 0.19  # as that of a run, which is readable in 600 px
_CHART_WIDTH_IN, _CHART_HEIGHT_IN = 4.4, 2.3  # of a figure of one chart
_MAX_SHORT_LABEL = 26  # characters of a label with another one next to it
_MAX_METRICS = 6
_MAX_SCALARS = 6
_EXIT_ROW = 0.09  # of an axis: the height of a line of text
_ROOM = 0.05  # around the values, as a share of their range


def draw_comparison(labels: Sequence[str], histories: Sequence[History], order: Sequence[int]) -> Figure:
    """Draw loss against steps, time, and bytes where they differ; then metrics and logged numbers, under one legend.

    The legend has the runs in this `order`; colors and dashes belong to their places in `histories`.
    """
    charts = _list_charts(labels, histories)
    (legend_columns, legend_rows), rows = _arrange_legend(labels), -(-len(charts) // 2)
    figure = create_figure(_WIDTH_IN, _ROW_HEIGHT_IN * rows + 0.2 + _LEGEND_LINE_IN * legend_rows)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(wspace=0.05, hspace=0.06)
    grid = figure.add_gridspec(rows, 2)
    panels = [figure.add_subplot(grid[k // 2, k % 2]) for k in range(len(charts) - len(charts) % 2)]
    if len(charts) % 2:  # the last one has a row of its own
        panels.append(figure.add_subplot(grid[-1, :]))
    for ax, draw in zip(panels, charts, strict=True):
        draw(ax)
        _let_equal_lines_take_turns(ax)
    _add_legend(figure, labels, order, legend_columns)
    style.fit_texts(figure)
    return figure


def draw_comparison_charts(labels: Sequence[str], histories: Sequence[History]) -> list[Figure]:
    """Draw the charts of :func:`draw_comparison` as figures, so that a page has as many in a row as fit.

    They have no legend: :func:`draw_comparison_legend` is above them all.
    """
    figures = []
    for draw in _list_charts(labels, histories):
        figures.append(create_figure(_CHART_WIDTH_IN, _CHART_HEIGHT_IN))
        ax = figures[-1].add_subplot()
        draw(ax)
        _let_equal_lines_take_turns(ax)
        style.fit_texts(figures[-1])
    return figures


def draw_comparison_legend(labels: Sequence[str], order: Sequence[int]) -> Figure:
    """Draw the names of the runs with their lines, in this order, as wide as a chart."""
    columns, rows = _arrange_legend(labels)
    figure = create_figure(_CHART_WIDTH_IN, _LEGEND_LINE_IN * rows + 0.05)
    _add_legend(figure, labels, order, columns)
    return figure


def _arrange_legend(labels: Sequence[str]) -> tuple[int, int]:
    """Return the columns and rows of the legend."""
    columns = 2 if max(map(len, labels)) <= _MAX_SHORT_LABEL else 1
    return columns, -(-len(labels) // columns)


def _add_legend(figure: Figure, labels: Sequence[str], order: Sequence[int], columns: int) -> None:
    """Add the names of the runs at the top of a figure, with their lines."""
    lines = [Line2D([], [], **_choose_line(k)) for k in order]
    figure.legend(
        lines, [labels[k] for k in order], loc="outside upper left", ncols=columns, frameon=False, fontsize=8,
        labelcolor=style.TEXT_COLOR, handlelength=3, labelspacing=0.35,
    )  # fmt: skip


def _list_charts(labels: Sequence[str], histories: Sequence[History]) -> list[Callable[[Axes], None]]:
    """Return a function for each chart, which draws it; the losses first."""
    metrics = list(dict.fromkeys(name for history in histories for name in list_metrics(history)))[:_MAX_METRICS]
    scalars = list_shared_scalars(histories)[:_MAX_SCALARS]
    draw_metric = functools.partial(_draw_metric, histories=histories, labels=labels)
    draw_scalar = functools.partial(_draw_scalar, histories=histories, labels=labels)
    return [
        *_list_loss_charts(labels, histories),
        *(functools.partial(draw_metric, name=name) for name in metrics),
        *(functools.partial(draw_scalar, name=name) for name in scalars),
    ]


def _list_loss_charts(labels: Sequence[str], histories: Sequence[History]) -> list[Callable[[Axes], None]]:
    """Return functions that draw the loss against steps, time, and bytes where runs differ in them, with one scale."""
    exits = find_exits(histories)
    parts = [
        dataclasses.replace(part, values=_end_means(part, step))
        for part, step in zip(downsample_losses(histories), exits, strict=True)
    ]
    cap = find_loss_cap([compute_drawn_losses(history.totals()) for history in histories])

    def draw_loss(ax: Axes, x_values: Sequence[np.ndarray], format_panel: Callable[[Axes], None]) -> None:
        _draw_runs(ax, x_values, parts, labels)
        format_panel(ax)
        _scale_loss_axis(ax, parts, cap)
        _write_exits(ax, labels, describe_exits(histories, exits))

    def accumulate(column: str) -> list[np.ndarray]:
        return [_accumulate(history, part, column) for history, part in zip(histories, parts, strict=True)]

    sent_bytes = accumulate("sent_bytes") if differ_in_bytes([make_row("", each, "") for each in histories]) else None
    steps, seconds = [part.middle_steps for part in parts], accumulate("step_s")
    charts: list[Callable[[Axes], None]] = [
        lambda ax: draw_loss(ax, steps, lambda ax: _format_steps_panel(ax, parts)),
        lambda ax: draw_loss(ax, seconds, lambda ax: _format_time_panel(ax, parts)),
    ]
    if sent_bytes is not None:
        charts.append(lambda ax: draw_loss(ax, sent_bytes, lambda ax: _format_bytes_panel(ax, sent_bytes)))
    return charts


def _end_means(part: CurveBuckets, step: int | None) -> np.ndarray:
    """Return the values of buckets whose means end where a run left the axes for good."""
    values = part.values.copy()
    last_steps = part.origin + part.width * (part.first + 1 + np.arange(len(values))) - 1
    values[:, -1, 1] = end_line(last_steps, values[:, -1, 1], step)
    return values


def list_metrics(history: History) -> list[str]:
    """Return the names of all validation metrics, the loss last."""
    names = dict.fromkeys(name for evaluation in history.evaluations for name in evaluation.values)
    return sorted(names, key=lambda name: name == "loss")


def _accumulate(history: History, buckets: CurveBuckets, column: str) -> np.ndarray:
    """Return the sum of a column by the end of each bucket; of bytes, the mean over the ranks."""
    totals = history.totals()
    sent = np.cumsum(totals["sent_bytes"] / np.maximum(1, totals["ranks"]))
    cumulative = np.concatenate([[0.0], sent if column == "sent_bytes" else read_step_ends(history)])
    end = buckets.origin + buckets.width * (buckets.first + 1 + np.arange(len(buckets.values))) - 1
    return np.asarray(cumulative[np.searchsorted(totals["step"], end, side="right")])


def _draw_metric(ax: Axes, name: str, histories: Sequence[History], labels: Sequence[str]) -> None:
    """Draw one validation metric of all runs."""
    style.style_axes(ax)
    style.format_step_axis(ax)
    style.set_title(ax, f"Validation {formatting.sanitize_text(name, MAX_TITLE_CHARS)}")
    drawn, exits = [np.empty(0)], find_exits(histories) if name == "loss" else [None] * len(labels)
    for k, (history, label) in enumerate(zip(histories, labels, strict=True)):
        points = [(e.step, e.values[name]) for e in history.evaluations if e.values.get(name) is not None]
        if points:
            steps, values = np.array(points, float).T
            values = end_line(steps, values, exits[k])
            drawn.append(values)
            _draw_line(ax, steps, values, k, label)
    shown, cap = np.concatenate(drawn), find_metric_cap(histories, name)
    if cap is not None:
        shown = shown[shown <= cap]
    if is_better_lower(name, join_directions(histories)) and is_steep(shown):
        _use_log_scale(ax)
    _leave_out(ax, shown, cap)
    _write_exits(ax, labels, describe_exits(histories, exits))


def _draw_scalar(ax: Axes, name: str, histories: Sequence[History], labels: Sequence[str]) -> None:
    """Draw a number from `dtkit.log` of all runs, as the mean over their ranks."""
    style.style_axes(ax)
    style.format_step_axis(ax)
    style.set_title(ax, formatting.sanitize_text(name, MAX_TITLE_CHARS), "logged, mean over all nodes")
    drawn = [read_scalar(history, name) for history in histories]
    if spans_orders_of([values for _, values in drawn]):  # as in the live view
        _use_log_scale(ax)
    for k, ((steps, values), label) in enumerate(zip(drawn, labels, strict=True)):
        _draw_line(ax, steps, values, k, label)


def _draw_runs(
    ax: Axes, x_values: Sequence[np.ndarray], run_buckets: Sequence[CurveBuckets], labels: Sequence[str]
) -> None:
    """Draw the mean loss of each run. Bands would hide the lines of other runs."""
    style.style_axes(ax)
    style.format_value_axis(ax.yaxis)
    for k, (x, part, label) in enumerate(zip(x_values, run_buckets, labels, strict=True)):
        _draw_line(ax, x, part.values[:, -1, 1], k, label)


def _draw_line(ax: Axes, x: np.ndarray, values: np.ndarray, run: int, label: str) -> None:
    """Draw the line of a run in its color and dashes, as the live view does, or its only value as a dot."""
    is_dot = np.isfinite(values).sum() == 1
    ax.plot(x, values, label=label, gid=label, marker="o" if is_dot else "", markersize=5, **_choose_line(run))


def _let_equal_lines_take_turns(ax: Axes) -> None:
    lines = [line for line in ax.get_lines() if line.get_gid()]
    data = [(np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)) for line in lines]
    for line, (place, count) in zip(lines, find_turns(data), strict=True):
        if count > 1:
            line.set_linestyle(choose_turn(place, count))


def _choose_line(run: int) -> dict[str, Any]:
    """Return color and dashes of a run's line."""
    color = style.COLORS[run % len(style.COLORS)]
    return {"color": color, "linestyle": _LINE_STYLES[choose_dash(run)], "linewidth": 1.5}


def _format_steps_panel(ax: Axes, run_buckets: Sequence[CurveBuckets]) -> None:
    style.format_step_axis(ax)
    style.set_title(ax, "Loss against steps", "mean over all nodes")
    if not any(len(part.values) for part in run_buckets):
        style.show_placeholder(ax)


def _format_time_panel(ax: Axes, run_buckets: Sequence[CurveBuckets]) -> None:
    style.set_title(ax, "Loss against time", "time in steps only")
    ax.set_xlabel("time", fontsize=8, color=style.MUTED_COLOR)
    style.format_time_axis(ax.xaxis)
    if not any(len(part.values) for part in run_buckets):
        style.show_placeholder(ax)


def _format_bytes_panel(ax: Axes, sent_bytes: Sequence[np.ndarray]) -> None:
    """Format the axis of bytes, which is logarithmic where the runs differ much."""
    style.set_title(ax, "Loss against bytes", "sent by each node for synchronization")
    ends = [float(sent[-1]) for sent in sent_bytes if len(sent) and sent[-1] > 0]
    if not ends:
        style.show_placeholder(ax, "nothing was sent")
        ax.set_xticks([])
        return
    ax.set_xlabel("bytes sent by a node", fontsize=8, color=style.MUTED_COLOR)
    if max(ends) / min(ends) >= _LOG_BYTES_RATIO:
        ax.set_xscale("log")
        style.format_log_axis(ax.xaxis, formatting.format_bytes)
    else:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: formatting.format_bytes(x) if x else "0"))


def _scale_loss_axis(ax: Axes, run_buckets: Sequence[CurveBuckets], cap: float | None) -> None:
    """Use a logarithmic scale where the loss falls far: the same one in all charts of it."""
    means = np.concatenate([np.empty(0), *(part.values[:, -1, 1] for part in run_buckets)])
    shown = means if cap is None else means[means <= cap]
    if is_steep(shown):
        _use_log_scale(ax)
    _leave_out(ax, shown, cap)


def _leave_out(ax: Axes, shown: np.ndarray, cap: float | None) -> None:
    """Limit an axis to the values up to a cap, and say so: a run that diverges would make the others flat lines."""
    if cap is None:
        return
    is_log = ax.get_yscale() == "log"
    known = shown[np.isfinite(shown) & (shown > (0 if is_log else -np.inf))]
    if not len(known):
        return
    low, high = float(known.min()), float(known.max())
    room = _ROOM * ((high - low) or abs(high))
    ax.set_ylim((low / 1.1, high * 1.1) if is_log else (low - room, high + room))
    note = f"above {formatting.format_loss(cap)} left out"
    ax.set_xlabel(f"{ax.get_xlabel()}; {note}", fontsize=8, color=style.MUTED_COLOR)  # the title has no room


def _write_exits(ax: Axes, labels: Sequence[str], words: Sequence[str]) -> None:
    """Write below the upper edge where lines ended because their runs diverged, each in the color of its line."""
    lines, (left, right) = {line.get_label(): line for line in ax.get_lines()}, ax.get_xlim()
    left_early = [(lines[label], text) for label, text in zip(labels, words, strict=True) if text and label in lines]
    for row, (line, text) in enumerate(left_early):
        x = np.asarray(line.get_xdata(), float)[np.isfinite(np.asarray(line.get_ydata(), float))].max(initial=left)
        ax.text(
            x, 0.98 - _EXIT_ROW * row, f" {text} ", transform=ax.get_xaxis_transform(), fontsize=7,
            ha="right" if x > (left + right) / 2 else "left", va="top", color=line.get_color(), fontweight="bold",
        )  # fmt: skip


def _use_log_scale(ax: Axes) -> None:
    ax.set_yscale("log")
    style.format_log_axis(ax.yaxis, formatting.format_loss)

"""The charts of a run's report."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.best_marks import find_best_mark
from dtkit.dashboard.summary.curves import (
    GRAD_NORM,
    LOSS,
    LR,
    MAX_NODE_LINES,
    THROUGHPUT,
    downsample,
    format_overall_label,
    make_chart_layouts,
)
from dtkit.dashboard.summary.series_names import MAX_TITLE_CHARS, split_unit
from dtkit.dashboard.svg_chart import MAX_POINTS, Series, draw_chart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.summary.curves import Chart, CurveBuckets
    from dtkit.history.history import History

_BUCKETS = MAX_POINTS  # a power of two


def draw_charts(history: History) -> str:
    """Return the charts that a history has data for."""
    charts = [chart for chart in _iterate_charts(history) if chart]
    return f'<div class="charts">{"".join(charts)}</div>' if charts else "<p>No step yet.</p>"


def _iterate_charts(history: History) -> Iterator[str]:
    draw = functools.partial(draw_chart, x_range=_get_range(history))  # the same step is at the same place in each
    loss = [*_make_series(history, LOSS, "mean"), *_make_validation_series(history, "loss", "validation")]
    yield draw("Loss", "", loss, format_y=formatting.format_loss, may_be_log=True)
    label = format_overall_label(history.num_ranks, history.ranks_per_replica)
    yield draw(
        "Throughput", "samples/s without waiting", from_zero=True, format_y=formatting.format_rate,
        series=_make_throughput_series(history, label),
    )  # fmt: skip
    logged = [name for name in history.scalar_names if np.isfinite(history.scalar(name)[1]).any()]
    for name in logged:
        validation = _make_validation_series(history, name, "validation")
        note = "logged, and its validation" if validation else "logged"
        series = [*_make_scalar_series(history, name), *validation]
        yield draw(split_unit(name)[0], note, series, format_y=formatting.format_loss)
    for name in list_metric_names(history):
        if name not in logged:  # else its validations are in that chart, as in the live view
            title = formatting.sanitize_text(name, MAX_TITLE_CHARS)
            series = _make_validation_series(history, name, name)
            yield draw(title, "validation", series, format_y=formatting.format_loss)
    if find_only_rate(history) is None:
        yield draw("Learning rate", "", _make_series(history, LR, "lr"), format_y=formatting.format_learning_rate)
    norms = _make_series(history, GRAD_NORM, "norm")
    yield draw("Gradient norm", "over all nodes", norms, format_y=formatting.format_loss, may_be_log=True)
    for name in history.system_names:
        title, unit = split_unit(name)
        series = _make_scalar_series(history, name)
        yield draw(title, f"{unit}, by node" if unit else "", series, format_y=formatting.format_loss, from_zero=True)


def find_only_rate(history: History) -> float | None:
    """Return the learning rate of all steps, which a line of text has instead of a chart; None if it changes."""
    rates = history.column("lr")
    rates = rates[np.isfinite(rates)]
    return float(rates[0]) if len(rates) and (rates == rates[0]).all() else None


def _get_range(history: History) -> tuple[float, float] | None:
    """Return the first and the last step; None before the first."""
    steps = history.totals()["step"]
    return (float(steps.min()), float(steps.max())) if len(steps) else None


def list_metric_names(history: History) -> list[str]:
    """Return the names of the validation metrics besides the loss."""
    return list(dict.fromkeys(n for e in history.evaluations for n in e.values if n != "loss"))


def _make_series(history: History, chart: Chart, overall: str) -> list[Series]:
    """Return a line for each of a few nodes, and one over all."""
    return _make_lines(downsample(history, chart, history.num_ranks, _BUCKETS), history, chart, overall)


def _make_throughput_series(history: History, overall: str) -> list[Series]:
    """Return lines with a band that leaves out the fastest and the slowest steps, which differ by more than nodes."""
    buckets = downsample(history, THROUGHPUT, history.num_ranks).merge_to_quantiles(_BUCKETS // 2).invert()
    lines = _make_lines(buckets, history, THROUGHPUT, overall)
    return [dataclasses.replace(line, band="10 to 90 %") for line in lines]


def _make_lines(buckets: CurveBuckets, history: History, chart: Chart, overall: str) -> list[Series]:
    (layout,) = make_chart_layouts([chart], history.num_ranks)
    has_lines = not layout.banded and layout.nodes > 1
    lines = [_make_line(f"node {k}", buckets, k, k) for k in range(layout.nodes)] if has_lines else []
    lines = [dataclasses.replace(line, is_part=layout.has_mean) for line in lines]
    last = _make_line(overall, buckets, -1, None if lines else 0)
    return [*lines, dataclasses.replace(last, is_dashed=not layout.has_mean)]


def _make_line(label: str, buckets: CurveBuckets, column: int, color: int | None) -> Series:
    low, mean, high = buckets.values[:, column].T
    return Series(label, buckets.middle_steps, mean, color, low=low, high=high, merged=buckets.width)


def _make_validation_series(history: History, name: str, label: str) -> list[Series]:
    points = [(e.step, e.values[name]) for e in history.evaluations if e.values.get(name) is not None]
    if not points:
        return []
    steps, values = np.array(points, float).T
    return [Series(label, steps, values, 7, exact=True, best=find_best_mark(history, name))]


def _make_scalar_series(history: History, name: str) -> list[Series]:
    ranks = history.ranks
    lines = []
    if 1 < len(ranks) <= MAX_NODE_LINES:
        lines = [Series(f"node {rank}", *history.scalar(name, rank), color=rank, is_part=True) for rank in ranks]
    return [*lines, Series("mean" if lines else name, *history.scalar(name), color=None if lines else 0)]

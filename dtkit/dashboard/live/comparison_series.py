"""Curves of a live comparison that don't share steps: loss against time, validation metrics, and logged numbers.

A series is a float32 array of shape (points, runs + 2): its position, a value for each run, and an empty last column,
where the views of one run have the line over all ranks. NaN where a run has no value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.live.messages import choose_evenly
from dtkit.dashboard.summary.comparison import read_scalar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history.history import History

MAX_POINTS = 128
MAX_METRICS = 6
MAX_SCALARS = 6
LOGGED_PREFIX = "dtkit.log/"
"""Begins the names of series with numbers from `dtkit.log`, which may be called like a metric."""


def list_metric_names(histories: Sequence[History]) -> list[str]:
    """Return the names of all validation metrics, the loss first."""
    names = dict.fromkeys(name for history in histories for e in history.evaluations for name in e.values)
    return sorted(names, key=lambda name: name != "loss")[:MAX_METRICS]


def make_time_series(histories: Sequence[History]) -> np.ndarray:
    """Return the mean loss over all ranks at the milliseconds that its steps have taken, without pauses."""
    totals = [history.totals() for history in histories]
    ends = [1e3 * np.cumsum(part["step_s"]) for part in totals]
    longest = max((float(end[-1]) for end in ends if len(end)), default=0.0)
    width = longest / MAX_POINTS
    if not width > 0:
        return np.empty((0, len(histories) + 2), "f4")
    series = np.full((MAX_POINTS, len(histories) + 2), np.nan)
    series[:, 0] = width * (np.arange(MAX_POINTS) + 0.5)
    for k, (part, end) in enumerate(zip(totals, ends, strict=True)):
        losses = part["loss"]
        known = np.abs(losses) < np.finfo("f4").max
        buckets = np.minimum((end[known] / width).astype("i8"), MAX_POINTS - 1)
        counts = np.bincount(buckets, minlength=MAX_POINTS)
        sums = np.bincount(buckets, losses[known], MAX_POINTS)
        series[:, 1 + k] = np.divide(sums, counts, out=np.full(MAX_POINTS, np.nan), where=counts > 0)
    return series.astype("f4")


def make_scalar_series(histories: Sequence[History], name: str) -> np.ndarray:
    """Return the means over all ranks of a number from `dtkit.log`, by step."""
    curves = [read_scalar(history, name) for history in histories]
    steps = np.concatenate([part for part, _ in curves])
    if not len(steps):
        return np.empty((0, len(histories) + 2), "f4")
    origin = int(steps.min())
    width = -(-(int(steps.max()) - origin + 1) // MAX_POINTS)
    count = (int(steps.max()) - origin) // width + 1
    series = np.full((count, len(histories) + 2), np.nan)
    series[:, 0] = np.minimum(origin + width * np.arange(count) + (width - 1) / 2, steps.max())
    for k, (part, values) in enumerate(curves):
        is_known = np.abs(values) < np.finfo("f4").max
        buckets = (part[is_known] - origin) // width
        counts = np.bincount(buckets, minlength=count)
        sums = np.bincount(buckets, values[is_known], count)
        series[:, 1 + k] = np.divide(sums, counts, out=np.full(count, np.nan), where=counts > 0)
    return np.asarray(series[np.isfinite(series[:, 1:-1]).any(axis=1)].astype("f4"))


def make_metric_series(histories: Sequence[History], name: str) -> np.ndarray:
    """Return the values of a validation metric by step, of an even choice of each run's evaluations."""
    by_step: dict[int, dict[int, float]] = {}
    for k, history in enumerate(histories):
        evaluations = [e for e in history.evaluations if e.values.get(name) is not None]
        for index in choose_evenly(range(len(evaluations)), MAX_POINTS):
            by_step.setdefault(evaluations[index].step, {})[k] = float(evaluations[index].values[name])
    series = np.full((len(by_step), len(histories) + 2), np.nan, "f8")
    for row, step in enumerate(sorted(by_step)):
        series[row, 0] = step
        for k, value in by_step[step].items():
            series[row, 1 + k] = value if abs(value) < np.finfo("f4").max else np.nan
    return series.astype("f4")

"""Curves of a live comparison that don't share steps: loss against time, validation metrics, and logged numbers.

A series is a float32 array of shape (points, runs + 2): its position, a value for each run, and an empty last column,
where the views of one run have the line over all ranks. NaN where a run has no value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.dashboard.live.evaluation_feed import choose_evenly
from dtkit.dashboard.summary.comparison import NUM_RATE_BUCKETS, read_scalar
from dtkit.dashboard.summary.short_batches import join_short_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history.history import History
    from dtkit.types import RunSpec

MAX_POINTS = 128
_MAX_TIMES = 64
MAX_METRICS = 6
MAX_SCALARS = 6
RATE = "dtkit.rate"
"""Name of the series of throughputs, which no metric has."""
LOGGED_PREFIX = "dtkit.log/"
"""Begins the names of series with numbers from `dtkit.log`, which may be called like a metric."""


def list_metric_names(histories: Sequence[History]) -> list[str]:
    """Return the names of all validation metrics, the loss first."""
    names = dict.fromkeys(name for history in histories for e in history.evaluations for name in e.values)
    return sorted(names, key=lambda name: name != "loss")[:MAX_METRICS]


def make_time_series(losses: Sequence[np.ndarray], ends: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean loss over all ranks at the milliseconds when its steps ended, without pauses."""
    longest = max((float(end[-1]) for end in ends if len(end)), default=0.0)
    width = longest / MAX_POINTS
    if not width > 0:
        return np.empty((0, len(losses) + 2), "f4")
    series = np.full((MAX_POINTS, len(losses) + 2), np.nan)
    series[:, 0] = width * (np.arange(MAX_POINTS) + 0.5)
    for k, (values, end) in enumerate(zip(losses, ends, strict=True)):
        known = np.abs(values) < np.finfo("f4").max
        buckets = np.minimum((end[known] / width).astype("i8"), MAX_POINTS - 1)
        counts = np.bincount(buckets, minlength=MAX_POINTS)
        sums = np.bincount(buckets, values[known], MAX_POINTS)
        series[:, 1 + k] = np.divide(sums, counts, out=np.full(MAX_POINTS, np.nan), where=counts > 0)
    return series.astype("f4")


def describe_axes(
    specs: Sequence[RunSpec | None],
    histories: Sequence[History],
    steps: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
) -> dict[str, Any]:
    """Return what a page needs to place each run's steps on other axes; None for one that some run lacks.

    "epoch" has the steps of an epoch, "samples" those of a step, "time" some steps with the milliseconds until their
    end. "last" has the last step. A history has no spec.
    """
    known = [spec for spec in specs if spec is not None]
    is_whole = len(known) == len(specs)
    times = [_choose_times(*each) for each in zip(steps, ends, strict=True)]
    epochs, samples = [spec.steps_per_epoch for spec in known], [spec.batch_size for spec in known]
    return {
        "epoch": epochs if is_whole and all(epochs) else None,
        "samples": samples if is_whole and all(samples) else None,
        "time": times if any(ends and ends[-1] > 0 for _, ends in times) else None,
        "last": [find_last_step(history) for history in histories],
    }


def _choose_times(steps: np.ndarray, ends: np.ndarray) -> tuple[list[int], list[float]]:
    """Return an even choice of steps, and the milliseconds when each one ended, without pauses."""
    chosen = list(choose_evenly(range(len(steps)), _MAX_TIMES))
    return [int(step) for step in steps[chosen]], [round(float(end), 3) for end in ends[chosen]]


def find_last_step(history: History) -> int:
    """Return the last step of the curves or the evaluations. A final evaluation counts the steps before it."""
    steps = history.totals(history.num_steps - 1)["step"]
    return max(int(steps.max(initial=0)), max((e.step for e in history.evaluations), default=0))


def make_scalar_series(histories: Sequence[History], name: str) -> np.ndarray:
    """Return the means over all ranks of a number from `dtkit.log`, by step."""
    return _average([read_scalar(history, name) for history in histories])


def make_rate_series(totals: Sequence[np.ndarray]) -> np.ndarray:
    """Return the samples per second of all ranks, by step, as smooth as those of a single run.

    The mean of seconds per sample is the time of all samples over their number; a mean of rates would exceed it.
    """
    parts = [join_short_batches(part) for part in totals]
    with np.errstate(divide="ignore", invalid="ignore"):
        sample_s = [(steps, seconds / samples) for steps, samples, seconds in parts]
        series = _average(sample_s, NUM_RATE_BUCKETS, [samples for _, samples, _ in parts])
        series[:, 1:] = 1 / series[:, 1:]
    return series


def _average(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
    max_points: int = MAX_POINTS,
    weights: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Return the means of (steps, values) of each run, in at most `max_points` parts of equal width."""
    steps = np.concatenate([part for part, _ in curves])
    if not len(steps):
        return np.empty((0, len(curves) + 2), "f4")
    origin = int(steps.min())
    width = -(-(int(steps.max()) - origin + 1) // max_points)
    count = (int(steps.max()) - origin) // width + 1
    series = np.full((count, len(curves) + 2), np.nan)
    series[:, 0] = np.minimum(origin + width * np.arange(count) + (width - 1) / 2, steps.max())
    for k, (part, values) in enumerate(curves):
        is_known = np.abs(values) < np.finfo("f4").max
        buckets = (part[is_known] - origin) // width
        own = np.ones(len(buckets)) if weights is None else weights[k][is_known]
        counts = np.bincount(buckets, own, count)
        sums = np.bincount(buckets, own * values[is_known], count)
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

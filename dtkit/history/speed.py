"""Speed of a run: the samples of some steps over the time that they took, the same in every view.

A rank's steps follow each other, so their sum is the time of the clock. The slowest steps of different ranks may
overlap: their sum would be too long where ranks don't wait for each other in each step.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dtkit.history.history import History

_MIN_REST_SECONDS, _MIN_REST_SHARE = 0.1, 0.05
_MIN_NOTED_SHARE = 0.05  # of the duration
_MAX_MEDIAN_STEPS = 1000  # a view asks again and again
_BLOCK_ROWS = 16_384  # as a history stores them, so that nothing is copied
STEADY_SECONDS = 1.0
"""Time in steps from which their speed is worth a comparison: that of fewer is chance."""
WHOLE_RUN_STEPS = "all steps but the first"
"""What views call the steps of a run's speed after its end. The first step warms up."""


class Speed(NamedTuple):
    """Speed of some steps; NaN without a step."""

    samples_per_s: float
    """Of all ranks."""
    step_s: float
    """Mean seconds of a step."""


class TimeParts(NamedTuple):
    """Parts of a run's duration, in seconds, whose sum it is."""

    steps_s: float
    """In all steps but the first: the time that the samples/s of a whole run are over."""
    first_step_s: float
    """In the first step, which warms up; 0 if it is the only one."""
    between_s: float
    """Between the steps: validation, saving, callbacks, and steps without a record or that were undone."""

    @property
    def is_mostly_steps(self) -> bool:
        """Return whether the rest is too short to be told apart from the whole."""
        rest_s = self.first_step_s + self.between_s
        return rest_s < max(_MIN_REST_SECONDS, _MIN_REST_SHARE * self.steps_s)

    def is_noted(self, part_s: float) -> bool:
        """Return whether one of the parts is long enough for views to name it."""
        return not self.is_mostly_steps and part_s >= _MIN_NOTED_SHARE * sum(self)

    @property
    def share_between(self) -> float:
        """Share of the time between the steps in the duration without the first step; 0 where no view names it."""
        return self.between_s / (self.steps_s + self.between_s) if self.is_noted(self.between_s) else 0.0


def split_time(history: History, elapsed_s: float) -> TimeParts:
    """Return the parts of `elapsed_s`, the seconds that the run of a history has taken without pauses."""
    num_known = max(1, history.num_steps - 1)
    rest_s = _measure_s(history, history.read_valid_totals(history.num_steps - num_known)) if history.num_steps else 0.0
    all_s = _measure_s(history, history.read_valid_totals(0)) if history.num_steps else 0.0
    return TimeParts(rest_s, max(0.0, all_s - rest_s), max(0.0, elapsed_s - all_s))


def compute_speed(history: History, max_steps: int | None = None) -> Speed:
    """Return the speed of the last `max_steps` steps, or of all.

    The first step of a run warms up, and is left out, unless it is the only one.
    """
    num_known = max(1, history.num_steps - 1)
    totals = history.read_valid_totals(
        history.num_steps - (num_known if max_steps is None else min(max_steps, num_known))
    )
    seconds = _measure_s(history, totals)
    if seconds <= 0:
        return Speed(math.nan, math.nan)
    return Speed(float(totals["samples"].sum()) / seconds, seconds / len(totals))


def read_step_ends(history: History) -> np.ndarray:
    """Return the seconds in steps until each one's end, of shape (steps,); the last one is the time of all steps.

    A step counts as its slowest rank takes, in proportion: those of different ranks may overlap.
    """
    totals = history.read_valid_totals()
    slowest_s = np.nan_to_num(totals["step_s"].astype("f8"), posinf=0.0)
    all_s = float(slowest_s.sum())
    return np.asarray(np.cumsum(slowest_s) * (_measure_s(history, totals) / all_s if all_s > 0 else 1.0))


def compute_median_step_s(history: History, num_ranks: int) -> float | None:
    """Return the median seconds of the last steps of `num_ranks` ranks, each of its slowest rank; None without one.

    The first step of a run warms up, and is left out, unless it is the only one.
    """
    totals = history.read_valid_totals(max(min(1, history.num_steps - 1), history.num_steps - _MAX_MEDIAN_STEPS))
    seconds = totals["step_s"][(totals["ranks"] == num_ranks) & (totals["step_s"] > 0)]
    return float(np.median(seconds)) if len(seconds) else None


def _measure_s(history: History, totals: np.ndarray) -> float:
    """Return the seconds that the last steps took, of which `totals` has a row each."""
    # A step's rows follow each other. While ranks are lost, the slowest of the others counts.
    num_ranks = totals["ranks"]
    end = history.num_valid_rows - int(num_ranks.sum())
    seconds = 0.0
    for part in _split_by_value(num_ranks):
        start, end = end, end + int(part.sum())
        seconds += float(_sum_by_rank(history, start, end).max(initial=0.0))
    return seconds


def _split_by_value(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the parts in each of which all numbers are equal, in this order."""
    differs = numbers[1:] != numbers[:-1]
    return np.split(numbers, np.flatnonzero(differs) + 1) if differs.any() else [numbers]


def _sum_by_rank(history: History, start: int, end: int) -> np.ndarray:
    """Return each rank's seconds in the rows `start` to `end`."""
    sums: np.ndarray = np.zeros(0)
    edges = [start, *range(start - start % _BLOCK_ROWS + _BLOCK_ROWS, end, _BLOCK_ROWS), end]
    for first, last in itertools.pairwise(edges):
        rows = history.read_valid_rows(first, last)
        seconds = rows["step_s"]
        added: np.ndarray = np.bincount(rows["rank"], np.where(np.isfinite(seconds), seconds, 0))
        shorter, sums = sorted((added, sums), key=len)  # a rank may be new
        sums[: len(shorter)] += shorter
    return sums

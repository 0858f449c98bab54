"""Speed of a run: the samples of some steps over the time that they took, the same in every view.

A rank's steps follow each other, so their sum is the time of the clock. The slowest steps of different ranks may
overlap: their sum would be too long where ranks don't wait for each other in each step.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dtkit.history.history import History

_BLOCK_ROWS = 16_384  # as a history stores them, so that nothing is copied


class Speed(NamedTuple):
    """Speed of some steps; NaN without a step."""

    samples_per_s: float
    """Of all ranks."""
    step_s: float
    """Mean seconds of a step."""


def compute_speed(history: History, max_steps: int | None = None) -> Speed:
    """Return the speed of the last `max_steps` steps, or of all.

    The first step of a run warms up, and is left out, unless it is the only one.
    """
    num_known = max(1, history.num_totals - 1)
    totals = history.read_totals(history.num_totals - (num_known if max_steps is None else min(max_steps, num_known)))
    seconds = _measure_s(history, totals)
    if seconds <= 0:
        return Speed(math.nan, math.nan)
    return Speed(float(totals["samples"].sum()) / seconds, seconds / len(totals))


def _measure_s(history: History, totals: np.ndarray) -> float:
    """Return the seconds that the last steps took, of which `totals` has a row each."""
    # A step's rows follow each other. While ranks are lost, the slowest of the others counts.
    changes = np.flatnonzero(np.diff(totals["ranks"])) + 1
    end = len(history) - int(totals["ranks"].sum())
    seconds = 0.0
    for part in np.split(totals["ranks"], changes):
        start, end = end, end + int(part.sum())
        seconds += max(_sum_by_rank(history, start, end).values(), default=0.0)
    return seconds


def _sum_by_rank(history: History, start: int, end: int) -> Counter[int]:
    """Return each rank's seconds in the rows `start` to `end`."""
    sums: Counter[int] = Counter()
    edges = [start, *range(start - start % _BLOCK_ROWS + _BLOCK_ROWS, end, _BLOCK_ROWS), end]
    for first, last in itertools.pairwise(edges):
        rows = history.rows(first, last)
        added = np.bincount(rows["rank"], np.nan_to_num(rows["step_s"].astype("f8"), posinf=0.0))
        sums.update(dict(enumerate(added.tolist())))
    return sums

"""Shares of the batch for ranks of unequal speed, from what their steps took: pure arithmetic.

A rank's computing time (data, forward, backward) for n samples is taken to be a straight line through what it takes
now. Its slope is that to the number of samples that it had before, or, until there was another one, time over samples.
Shares that let all ranks arrive at the all-reduce together follow. Waiting and communication say nothing of a rank.

The lower quartile over some steps stands for a rank: a busy machine delays single steps, and none is ever too fast.
Shares change only if the slowest rank's time is to fall by what is worth it; where a step's fixed part is most of it,
no share would help much, and they stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_STEPS = 4  # to be seen before a change
MIN_GAIN = 0.05  # of the slowest rank's time: what a change must promise
MIN_SAMPLE_CHANGE = 0.1  # of the larger number of samples: nearer ones tell no slope


class LoadBalancer:
    """Fed with all ranks' rows as they land; holds the shares to send along."""

    def __init__(self, shard_sizes: Sequence[int]) -> None:
        """`sizes`: rows of each rank's shard, which is what shares begin as."""
        total = sum(shard_sizes)
        self.shares: tuple[float, ...] = tuple(size / total for size in shard_sizes)
        self._measurements: list[list[tuple[int, float]]] = [
            [] for _ in shard_sizes
        ]  # (samples, seconds) with the present shares
        self._previous_points: list[tuple[float, float] | None] = [None] * len(shard_sizes)
        self._is_warmed_up = False

    def on_result(self, rows: Sequence[np.ndarray]) -> bool:
        """Take in one dispatch's rows, by rank; whether shares changed."""
        if not self._is_warmed_up:  # the first dispatch compiles and warms up
            self._is_warmed_up = True
            return False
        for now, mine in zip(self._measurements, rows, strict=True):
            seconds = mine["data_s"] + mine["forward_s"] + mine["backward_s"]
            now += [(int(n), float(t)) for n, t in zip(mine["samples"], seconds, strict=True) if n]
        if min(map(len, self._measurements)) < MIN_STEPS:
            return False
        points = [_summarize_steps(now) for now in self._measurements]
        slopes = [_estimate_slope(point, before) for point, before in zip(points, self._previous_points, strict=True)]
        found = _solve_shares(points, slopes)
        self._measurements = [[] for _ in self._measurements]
        if found is None:
            return False
        self._previous_points = list(points)
        self.shares = found
        return True


def _summarize_steps(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(samples, seconds) of a full step: the last of an epoch is smaller."""
    samples, seconds = np.array(steps).T
    usual = float(np.median(samples))
    return usual, float(np.quantile(seconds[np.abs(samples - usual) <= 1], 0.25))


def _estimate_slope(point: tuple[float, float], previous_point: tuple[float, float] | None) -> float:
    """Seconds that a sample more takes; no more than time over samples, since a step's fixed part is not negative."""
    whole = point[1] / point[0]
    if previous_point is None or abs(point[0] - previous_point[0]) < MIN_SAMPLE_CHANGE * max(
        point[0], previous_point[0]
    ):
        return whole
    return min(max((point[1] - previous_point[1]) / (point[0] - previous_point[0]), 1e-9), whole)


def _solve_shares(points: Sequence[tuple[float, float]], slopes: Sequence[float]) -> tuple[float, ...] | None:
    """Shares with which all ranks end at the same time; None where the slowest would hardly end earlier."""
    counts, times = np.array(points).T
    slope, batch = np.array(slopes), counts.sum()
    ends = (batch - (counts - times / slope).sum()) / (1 / slope).sum()
    found = np.maximum(counts + (ends - times) / slope, min(1.0, batch / len(counts)))
    found *= batch / found.sum()
    then = float((times + slope * (found - counts)).max())
    return tuple((found / batch).tolist()) if then < (1 - MIN_GAIN) * times.max() else None

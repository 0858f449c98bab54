"""Shares of the batch for ranks of unequal speed, computed from the times of their steps.

A rank's computing time (data, forward, backward) is modeled as a straight line over its number of samples. The slope is
estimated from two different numbers of samples. Until there is a second one, it is time over samples. The shares let
all ranks arrive at the all-reduce together. Waiting and communication times are excluded, since they depend on other
ranks.

A rank's time is the lower quartile over some steps: a busy machine delays single steps but never speeds one up. Shares
change only if this reduces the slowest rank's time by enough. If the fixed part of a step dominates, no change of
shares helps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_STEPS = 4  # steps to measure before a change
MIN_GAIN = 0.05  # share of the slowest rank's time that a change must save
MIN_SAMPLE_CHANGE = 0.1  # relative difference of two numbers of samples that give a slope


class LoadBalancer:
    """The shares to send with each dispatch, from the rows of all ranks."""

    def __init__(self, shard_sizes: Sequence[int]) -> None:
        """Begin with shares proportional to each rank's rows."""
        total = sum(shard_sizes)
        self.shares: tuple[float, ...] = tuple(size / total for size in shard_sizes)
        self._measurements: list[list[tuple[int, float]]] = [
            [] for _ in shard_sizes
        ]  # (samples, seconds) with the present shares
        self._previous_points: list[tuple[float, float] | None] = [None] * len(shard_sizes)
        self._is_warmed_up = False

    def on_result(self, rows: Sequence[np.ndarray]) -> bool:
        """Note the rows of one dispatch, by rank; return whether shares changed."""
        if not self._is_warmed_up:  # the first dispatch includes compilation and warm-up
            self._is_warmed_up = True
            return False
        for measured, own_rows in zip(self._measurements, rows, strict=True):
            seconds = own_rows["data_s"] + own_rows["forward_s"] + own_rows["backward_s"]
            measured += [(int(n), float(t)) for n, t in zip(own_rows["samples"], seconds, strict=True) if n]
        if min(map(len, self._measurements)) < MIN_STEPS:
            return False
        points = [_summarize_steps(measured) for measured in self._measurements]
        slopes = [_estimate_slope(point, before) for point, before in zip(points, self._previous_points, strict=True)]
        shares = _solve_shares(points, slopes)
        self._measurements = [[] for _ in self._measurements]
        if shares is None:
            return False
        self._previous_points = list(points)
        self.shares = shares
        return True


def _summarize_steps(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (samples, seconds) of a full step. The last step of an epoch is smaller, and excluded."""
    samples, seconds = np.array(steps).T
    usual = float(np.median(samples))
    return usual, float(np.quantile(seconds[np.abs(samples - usual) <= 1], 0.25))


def _estimate_slope(point: tuple[float, float], previous_point: tuple[float, float] | None) -> float:
    """Return seconds per additional sample, at most time over samples, since a step's fixed part is not negative."""
    whole = point[1] / point[0]
    if previous_point is None or abs(point[0] - previous_point[0]) < MIN_SAMPLE_CHANGE * max(
        point[0], previous_point[0]
    ):
        return whole
    return min(max((point[1] - previous_point[1]) / (point[0] - previous_point[0]), 1e-9), whole)


def _solve_shares(points: Sequence[tuple[float, float]], slopes: Sequence[float]) -> tuple[float, ...] | None:
    """Return shares with which all ranks end at the same time; None if the slowest would hardly end earlier."""
    counts, times = np.array(points).T
    slope, batch = np.array(slopes), counts.sum()
    ends = (batch - (counts - times / slope).sum()) / (1 / slope).sum()
    samples = np.maximum(counts + (ends - times) / slope, min(1.0, batch / len(counts)))
    samples *= batch / samples.sum()
    slowest_s = float((times + slope * (samples - counts)).max())
    return tuple((samples / batch).tolist()) if slowest_s < (1 - MIN_GAIN) * times.max() else None

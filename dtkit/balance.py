"""Shares of the batch for ranks of unequal speed, from what their steps took: pure arithmetic.

A rank's computing time (data, forward, backward) for n samples is taken to be a + b n. With b = t / n and a = 0 until
the rank was seen at two different n, then by least squares. Shares that let all ranks arrive at the all-reduce together
follow: n_i = (T - a_i) / b_i, with T such that they add up to the batch. Waiting and communication say nothing of a
rank.

The lower quartile over some steps stands for a rank: a busy machine delays single steps, and none is ever too fast.
Shares change only if the slowest rank's time is to fall by what is worth it; where a step's fixed part is most of it,
no share would help much, and they stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 4  # to be seen before a change
WORTH = 0.05  # of the slowest rank's time: what a change must promise
KEPT = 6  # different numbers of samples that are remembered


class Balancer:
    """Fed with all ranks' rows as they land; holds the shares to send along."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: rows of each rank's shard, which is what shares begin as."""
        total = sum(sizes)
        self.shares: tuple[float, ...] = tuple(size / total for size in sizes)
        self._seen: list[dict[int, list[float]]] = [{} for _ in sizes]
        self._steps = 0
        self._warm = False

    def landed(self, rows: Sequence[np.ndarray]) -> bool:
        """Take in one dispatch's rows, by rank; whether shares changed."""
        if not self._warm:  # the first dispatch compiles and warms up
            self._warm = True
            return False
        for seen, mine in zip(self._seen, rows, strict=True):
            self._note(seen, mine)
        self._steps += len(rows[0])
        if self._steps < STEPS or not all(self._seen):
            return False
        found = self._together([int(np.median(mine["samples"])) for mine in rows])
        if found is None:
            return False
        self.shares, self._steps = found, 0
        return True

    def _note(self, seen: dict[int, list[float]], rows: np.ndarray) -> None:
        for count in np.unique(rows["samples"][rows["samples"] > 0]).tolist():
            mine = rows[rows["samples"] == count]
            seconds = mine["data_s"] + mine["forward_s"] + mine["backward_s"]
            seen[count] = (seen.pop(count, []) + seconds.tolist())[-50:]
        for count in list(seen)[:-KEPT]:
            del seen[count]

    def _together(self, counts: Sequence[int]) -> tuple[float, ...] | None:
        """Shares with which all ranks end at the same time; None where that is not worth a change."""
        lines = [_line(seen) for seen in self._seen]
        fixed, slope = np.array(lines).T
        batch = sum(counts)
        ends = (batch + (fixed / slope).sum()) / (1 / slope).sum()
        found = np.maximum((ends - fixed) / slope, min(1.0, batch / len(counts)))
        found *= batch / found.sum()
        now, then = (float((fixed + slope * n).max()) for n in (np.array(counts), found))
        return tuple((found / found.sum()).tolist()) if then < (1 - WORTH) * now else None


def _line(seen: dict[int, list[float]]) -> tuple[float, float]:
    """(a, b) of a rank's time a + b n, both at least 0."""
    counts = np.array([n for n, times in seen.items() if len(times) >= min(3, max(map(len, seen.values())))], float)
    times = np.array([np.quantile(seen[int(n)], 0.25) for n in counts])
    spread = counts - counts.mean()
    slope = float((spread * times).sum() / (spread**2).sum()) if len(counts) > 1 else float(times[0] / counts[0])
    slope = max(slope, 1e-9)
    return max(0.0, float(times.mean() - slope * counts.mean())), slope

"""Shares of the batch for ranks of unequal speed, from what their steps took: pure arithmetic.

A rank's cost is its computing time (data, forward, backward) per sample; waiting and communication say nothing of it.
Shares in proportion to 1 / cost let all ranks arrive at the all-reduce together. Where a step has a part that does not
depend on samples, cost changes with the share, and repeating the same rule still ends where all times are equal: that
is its only fixed point.

The lower quartile over some steps stands for a rank: a busy machine delays single steps, and none is ever too fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 4  # to be seen before a change
WORTH = 0.04  # a change of any rank's share by less than this part of it is not worth making


class Balancer:
    """Fed with all ranks' rows as they land; holds the shares to send along."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: rows of each rank's shard, which is what shares begin as."""
        total = sum(sizes)
        self.shares: tuple[float, ...] = tuple(size / total for size in sizes)
        self._costs: list[list[float]] = [[] for _ in sizes]
        self._warm = False

    def landed(self, rows: Sequence[np.ndarray]) -> bool:
        """Take in one dispatch's rows, by rank; whether shares changed."""
        if not self._warm:  # the first dispatch compiles and warms up
            self._warm = True
            return False
        for costs, mine in zip(self._costs, rows, strict=True):
            busy = mine[mine["samples"] > 0]
            seconds = busy["data_s"] + busy["forward_s"] + busy["backward_s"]
            costs.extend((seconds / busy["samples"]).tolist())
        if min(map(len, self._costs)) < STEPS:
            return False
        found = self._proportional()
        for costs in self._costs:
            costs.clear()
        if all(abs(new - old) <= WORTH * old for new, old in zip(found, self.shares, strict=True)):
            return False
        self.shares = found
        return True

    def _proportional(self) -> tuple[float, ...]:
        speeds = 1 / np.maximum([np.quantile(costs, 0.25) for costs in self._costs], 1e-9)
        return tuple((speeds / speeds.sum()).tolist())

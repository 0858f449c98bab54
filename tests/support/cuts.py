"""The best cut of layers into stages, by brute force."""

from __future__ import annotations

import itertools


def best(costs, parts):
    """The smallest possible largest part, by trying all."""
    n = len(costs)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends, n]))
        for ends in itertools.combinations(range(1, n), parts - 1)
    )

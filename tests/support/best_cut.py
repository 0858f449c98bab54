"""Best split of layers into stages, by brute force."""

from __future__ import annotations

import itertools


def find_smallest_maximum(costs, parts):
    """Return the smallest possible largest part, found by trying all splits."""
    n = len(costs)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends, n]))
        for ends in itertools.combinations(range(1, n), parts - 1)
    )

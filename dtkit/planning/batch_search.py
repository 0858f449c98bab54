"""Search for the largest batch that fits into the memory of every rank."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.planning.plan import build_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.planning.cost_model import Benchmark, MemoryBudget, ModelProfile
    from dtkit.strategies.base import Strategy

_MAX_BATCH = 2**24
"""Upper limit of the search, larger than any batch in practice."""


def find_largest_batch(
    strategy: Strategy,
    profiles: Sequence[ModelProfile],
    batch_size: int,
    benchmark: Benchmark,
    memory_budgets: Sequence[MemoryBudget],
) -> int:
    """Return the largest batch over all ranks that fits, by bisection; 0 if a sample for each rank doesn't fit.

    `profiles` are those of `batch_size`.
    """

    def fits(size: int) -> bool:
        scaled = [dataclasses.replace(profile, rows=-(-profile.rows * size // batch_size)) for profile in profiles]
        costs = [strategy.estimate_cost(profile, benchmark) for profile in scaled]
        return all(row.fits for row in build_rows("", scaled, costs, memory_budgets))

    low, high = 0, len(profiles)
    while high <= _MAX_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low if low >= len(profiles) else 0

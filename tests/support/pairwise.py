"""Pairwise testing: the few combinations that contain every pair of values."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

Pair = tuple["Hashable", "Hashable"]


def pairs_of(values: Sequence[Hashable]) -> set[Pair]:
    """Return each pair of values of one combination."""
    return set(itertools.combinations(values, 2))


def choose_covering(candidates: Sequence[set[Pair]]) -> list[int]:
    """Return the indices of few candidates that together have each pair that any of them has."""
    missing = set().union(*candidates)
    chosen = []
    while missing:
        best = max(range(len(candidates)), key=lambda index: len(candidates[index] & missing))
        missing -= candidates[best]
        chosen.append(best)
    return sorted(chosen)

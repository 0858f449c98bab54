"""Steps that a history has twice, because the run went back to a snapshot and took them again.

All rows stay in order of arrival, as live charts and the log on disk need them. What a user reads leaves out the steps
that were undone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history.growing_array import GrowingArray


@dataclasses.dataclass(frozen=True)
class UndoneSteps:
    """The run went back: steps from `first` on were undone. In a log, this holds for the items before it."""

    first: int


class Return(NamedTuple):
    """The run went back: of the first rows and totals, those from a step on were undone."""

    num_rows: int
    num_totals: int
    step: int


def find_returns(rows: GrowingArray, totals: GrowingArray, block: np.ndarray) -> list[Return]:
    """Return whether the run went back before `block`, which follows `rows` and is sorted by step: one return, or none.

    Rows that single ranks had kept may arrive later than those of other ranks. They undo nothing.
    """
    last = totals.read(len(totals) - 1, len(totals))["step"]
    if not len(block) or not len(last) or block["step"][0] > last[0]:
        return []
    step, known = int(block["step"][0]), rows.read(0, len(rows))
    again = known[known["step"] >= step]
    is_same_rank = bool(np.isin(again["rank"], block["rank"]).any())
    return [Return(len(rows), len(totals), step)] if is_same_rank else []


def keep_valid(table: np.ndarray, ends: list[tuple[int, int]]) -> np.ndarray:
    """Return the table without what was undone: before each (end, step), the steps from `step` on."""
    if not ends:
        return table
    is_valid = np.ones(len(table), bool)
    for end, step in ends:
        is_valid[:end] &= table["step"][:end] < step
    return np.asarray(table[is_valid])


def split_returns(rows: np.ndarray) -> list[np.ndarray]:
    """Return the parts of rows in order of arrival, between which the run went back to an earlier step."""
    return [part for part in np.split(rows, np.flatnonzero(np.diff(rows["step"]) < 0) + 1) if len(part)]


def count_unchanged(known: Sequence[object], current: Sequence[object]) -> int:
    """Return how many of the first items are still those that a reader of a history knows."""
    pairs = zip(known, current, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a is not b), min(len(known), len(current)))

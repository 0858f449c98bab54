"""Steps that count no more, because the run went back to a snapshot from before them.

All rows stay in order of arrival, as the log on disk needs them. What a user reads leaves out the steps that were
undone: a table knows the ranges of its rows that still count.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtkit.history.growing_array import GrowingArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class UndoneSteps:
    """The run went back: steps from `first` on were undone. In a log, this holds for the items before it."""

    first: int
    num_rows: int = 0
    """Number of rows that had arrived: these and no later ones were undone. A history fills it in."""


class _ClosedRanges(NamedTuple):
    """Ranges of valid rows, before the last range, which is open."""

    ranges: tuple[tuple[int, int], ...] = ()
    num_rows: int = 0
    """Number of rows before the open range, with those that were undone."""
    num_valid: int = 0


class UndoableArray(GrowingArray):
    """A growing table with a column ``step``. Rows may be undone: they stay, but :meth:`read_valid` skips them."""

    _closed = _ClosedRanges()  # replaced as a whole, since other threads read it

    @property
    def num_valid(self) -> int:
        """Number of rows that were not undone."""
        closed = self._closed  # read first: rows that are appended meanwhile are in the open range
        return closed.num_valid + self._length - closed.num_rows

    def undo_from(self, step: int) -> bool:
        """Undo the rows of the steps from `step` on. Return whether there were any."""
        closed: list[tuple[int, int]] = []
        for start, stop in self._list_valid():
            is_valid = self.read(start, stop)["step"] < step
            edges = np.flatnonzero(np.diff(np.concatenate([[False], is_valid, [False]])))
            closed += [(start + a, start + b) for a, b in edges.reshape(-1, 2).tolist()]
        if sum(stop - start for start, stop in closed) == self.num_valid:
            return False
        self._close(closed)
        return True

    def extend(self, other: UndoableArray) -> None:
        """Append the rows of another array. Those that were undone there stay undone."""
        before, base = list(self._list_valid()), len(self)
        self.append(other.read(0, len(other)))
        if other.num_valid < len(other):
            self._close([*before, *((base + start, base + stop) for start, stop in other._list_valid())])

    def _close(self, ranges: list[tuple[int, int]]) -> None:
        self._closed = _ClosedRanges(tuple(ranges), len(self), sum(stop - start for start, stop in ranges))

    def read_valid(self, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop` (clipped) of those that were not undone."""
        if not self._closed.num_rows:  # as in most runs
            return self.read(start, stop)
        parts, begin = [], 0
        for first, last in self._list_valid():
            end = begin + last - first
            if start < end and begin < stop:
                parts.append(self.read(first + max(0, start - begin), first + min(stop, end) - begin))
            begin = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else self.read(0, 0)

    def _list_valid(self) -> Iterator[tuple[int, int]]:
        closed = self._closed
        yield from closed.ranges
        if len(self) > closed.num_rows:
            yield closed.num_rows, len(self)


def split_returns(rows: np.ndarray) -> list[np.ndarray]:
    """Return the parts of rows in order of arrival, between which the run went back to an earlier step."""
    return [part for part in np.split(rows, np.flatnonzero(np.diff(rows["step"]) < 0) + 1) if len(part)]


def count_unchanged(known: Sequence[object], current: Sequence[object]) -> int:
    """Return how many of the first items are still those that a reader of a history knows."""
    pairs = zip(known, current, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a is not b), min(len(known), len(current)))

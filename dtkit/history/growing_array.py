"""A table that grows while others read it."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

_CHUNK_ROWS = 16384


class GrowingArray:
    """Growing array in chunks that never move."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._chunks: list[np.ndarray] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, block: np.ndarray) -> None:
        """Append a copy of `block`."""
        while len(block):
            used = self._length % _CHUNK_ROWS
            if used == 0:
                self._chunks.append(np.empty(_CHUNK_ROWS, self._dtype))
            take = block[: _CHUNK_ROWS - used]
            self._chunks[-1][used : used + len(take)] = take
            self._length += len(take)
            block = block[len(take) :]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop` (clipped) as one array."""
        start, stop = max(0, start), min(stop, self._length)
        if start >= stop:
            return np.empty(0, self._dtype)
        first, last = start // _CHUNK_ROWS, (stop - 1) // _CHUNK_ROWS
        parts = []
        for k in range(first, last + 1):
            lo = start - k * _CHUNK_ROWS if k == first else 0
            hi = stop - k * _CHUNK_ROWS if k == last else _CHUNK_ROWS
            parts.append(self._chunks[k][lo:hi])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_range(call: str, start: object, stop: object) -> None:
    """Raise TypeError for limits that are no whole numbers, of a call such as ``history.rows(start, stop)``."""
    for name, value in (("start", start), ("stop", stop)):
        if not (isinstance(value, numbers.Integral) or (name == "stop" and value is None)):
            raise TypeError(f"{call}({name}={value!r}): a whole number is needed, as in history.{call}(0, 100)")


def check_index(index: object, length: int) -> None:
    """Raise TypeError or IndexError for an index that a history of `length` rows doesn't have."""
    if not isinstance(index, int | np.integer):
        raise TypeError(
            f"history[{index!r}]: an index is a whole number; history.rows(0, 100) returns several rows, and "
            "history.to_pandas() a table with columns"
        )
    if not -length <= index < length:
        raise IndexError(f"row {index} of {length}")


def select_rows(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the rows where `mask` is true; if it is everywhere, `rows` itself, since copies of rows take long."""
    return rows if mask.all() else rows[mask]

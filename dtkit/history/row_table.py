"""Rows of all ranks and steps, and their totals over the ranks, with what was undone.

One thread appends. Others may read at any time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.history.totals import TOTAL_DTYPE, sum_over_ranks
from dtkit.history.undone_steps import UndoableArray, UndoneSteps

if TYPE_CHECKING:
    from collections.abc import Sequence


class RowTable:
    """Rows and totals in order of arrival. Reads with ``valid`` in their name leave out undone steps."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._rows, self._totals = UndoableArray(dtype), UndoableArray(TOTAL_DTYPE)
        self._ranks: set[int] = set()  # views ask often, and reading a million rows takes long
        self._returns: list[UndoneSteps] = []
        # locks: while rows are appended or undone
        self._lock = threading.Lock()

    # -- writing ----------------------------------------------------------------------------------------------

    def append(self, block: np.ndarray, ranks_per_replica: int) -> None:
        """Append rows that are sorted by step."""
        totals = sum_over_ranks(block)
        totals["samples"] //= ranks_per_replica
        with self._lock:
            self._rows.append(block)
            self._totals.append(totals)
            self._ranks.update(np.unique(block["rank"]).tolist())

    def undo_from(self, step: int) -> None:
        """Undo the steps from `step` on."""
        with self._lock:
            if self._rows.undo_from(step):
                self._totals.undo_from(step)
                self._returns.append(UndoneSteps(step, len(self._rows)))

    def extend(self, other: RowTable) -> None:
        """Append another table, with what was undone there."""
        with self._lock, other._lock:
            num_rows = len(self._rows)
            self._returns += [UndoneSteps(back.first, num_rows + back.num_rows) for back in other._returns]
            self._rows.extend(other._rows)
            self._totals.extend(other._totals)
            self._ranks |= other._ranks

    def find_return(self, block: np.ndarray) -> int | None:
        """Return the step to which the run went back before `block`, sorted rows that follow; None if it didn't.

        Rows that single ranks had kept may arrive later than those of other ranks. They undo nothing.
        """
        last = self.read_valid_totals(self.num_valid_totals - 1)["step"]
        if not len(block) or not len(last) or block["step"][0] > last[0]:
            return None
        step, known = int(block["step"][0]), self.read_valid()
        again = known[known["step"] >= step]
        return step if bool(np.isin(again["rank"], block["rank"]).any()) else None

    # -- reading ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_totals(self) -> int:
        """Number of totals, with undone steps."""
        return len(self._totals)

    @property
    def num_valid(self) -> int:
        """Number of rows without those of undone steps."""
        return self._rows.num_valid

    @property
    def num_valid_totals(self) -> int:
        """Number of totals without those of undone steps."""
        return self._totals.num_valid

    @property
    def ranks(self) -> list[int]:
        """Ranks that have rows."""
        with self._lock:
            return sorted(self._ranks)

    @property
    def returns(self) -> Sequence[UndoneSteps]:
        """What was undone, in this order."""
        with self._lock:
            return tuple(self._returns)

    def read(self, start: int, stop: int | None) -> np.ndarray:
        """Return rows `start` to `stop`."""
        with self._lock:
            return self._rows.read(start, len(self._rows) if stop is None else stop)

    def read_valid(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows `start` to `stop` of those that were not undone."""
        with self._lock:
            return self._rows.read_valid(start, len(self._rows) if stop is None else stop)

    def read_totals(self, start: int, stop: int | None) -> np.ndarray:
        """Return totals `start` to `stop`; the loss is the weighted mean."""
        with self._lock:
            return self._totals.read(start, len(self._totals) if stop is None else stop)

    def read_valid_totals(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return totals `start` to `stop` of those that were not undone."""
        with self._lock:
            return self._totals.read_valid(start, len(self._totals) if stop is None else stop)

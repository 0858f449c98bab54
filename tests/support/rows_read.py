"""Counts of the rows of a history that are read, for tests of what a look at a long run costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.history.row_table import RowTable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import pytest


def count_rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each read of any history from now on adds its number of rows."""
    counts: list[int] = []

    def count(read: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def read_and_count(*args: object) -> np.ndarray:
            rows = read(*args)
            counts.append(len(rows))
            return rows

        return read_and_count

    for name in ("read", "read_valid", "read_totals", "read_valid_totals"):
        monkeypatch.setattr(RowTable, name, count(getattr(RowTable, name)))
    return counts

"""Numbers that a call of the user's function has logged, as a history has them: by name, rank and row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.history.scalars import ScalarRecord, ScalarTables
from dtkit.types import RESERVED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


class LoggedRows:
    """Tables of logged rows. Each row is read once, since a loop may log a million. The step is the row's index."""

    system_names: Sequence[str] = ()
    """Names of the machines' numbers: there are none."""

    def __init__(self) -> None:
        self._tables = ScalarTables()
        self._ranks: set[int] = set()
        self._num_read = 0
        self.num_steps = 0
        """Largest number of rows of a rank."""

    def update(self, rows: Sequence[dict[str, Any]]) -> None:
        """Read the new rows."""
        new_rows = rows[self._num_read :]
        self._num_read += len(new_rows)  # not the list's length, which may have grown since
        by_rank: dict[int, dict[str, list[tuple[int, float, float]]]] = {}
        for row in new_rows:
            columns = by_rank.setdefault(row["rank"], {})
            self.num_steps = max(self.num_steps, row["index"] + 1)
            for name, value in row.items():
                if name not in RESERVED_COLUMNS:
                    columns.setdefault(name, []).append((row["index"], value, 1.0))
        self._ranks |= by_rank.keys()
        for rank, columns in by_rank.items():
            self._tables.add(ScalarRecord(rank, columns))

    @property
    def scalar_names(self) -> Sequence[str]:
        """Names in the order in which they were first logged."""
        return self._tables.names

    @property
    def ranks(self) -> list[int]:
        """Ranks that have rows."""
        return sorted(self._ranks)

    def find_lost_steps(self, _rank: int | None = None) -> list[tuple[int, int]]:
        """Return no steps: a call's rows don't say which ones are missing."""
        return []

    def count_scalar_records(self, name: str) -> int:
        """Return how often numbers of this name were added."""
        return self._tables.count_records(name)

    def scalar(self, name: str, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return (indices, values) of one rank, or the mean over all ranks."""
        return self._tables.read(name, rank)

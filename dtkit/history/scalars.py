"""Numbers that a training passed to `dtkit.log`, by name, rank and step.

They are few and arrive in any order. So each name has a table of its own next to the history's rows.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dtkit.types import Evaluation, Scalars

SYSTEM_PREFIX = "system/"
"""Prefix of the names that engines report of themselves."""

CORE_WAIT_NAME = f"{SYSTEM_PREFIX}waiting for a core (%)"
"""Share of a training thread's time in which it was ready to run, but waited for a core."""

SCALAR_DTYPE = np.dtype([("step", "i4"), ("rank", "i4"), ("total", "f8"), ("weight", "f8")])
"""Row of one name, rank and step; the value is the total divided by the weight."""

_COLUMN_ALIASES = {"learning_rate": "lr", "gradient_norm": "grad_norm", "memory": "memory_bytes"}
_RATES = ("samples/s", "samples_per_second")


@dataclasses.dataclass(frozen=True)
class ScalarRecord:
    """One rank's numbers of some steps, as a line of the run log."""

    rank: int
    scalars: Scalars


class ScalarTables:
    """Tables of all names. One thread appends; others read."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}
        self._num_changes: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """Names in the order in which they were first logged."""
        return list(self._parts)

    def count_records(self, name: str) -> int:
        """Return how often numbers of this name were added or dropped."""
        return self._num_changes.get(name, 0)

    def add(self, record: ScalarRecord) -> None:
        """Append one rank's numbers."""
        for name, rows in record.scalars.items():
            part = np.zeros(len(rows), SCALAR_DTYPE)
            steps, totals, weights = zip(*rows, strict=True)
            part["step"], part["total"], part["weight"], part["rank"] = steps, totals, weights, record.rank
            self._parts.setdefault(name, []).append(part)
            self._num_changes[name] = self.count_records(name) + 1

    def drop_from(self, step: int) -> None:
        """Drop the numbers of the steps from `step` on, which were undone."""
        for name, parts in self._parts.items():
            kept = [part[part["step"] < step] for part in parts]
            if sum(map(len, kept)) < sum(map(len, parts)):
                self._parts[name] = [part for part in kept if len(part)]  # other threads may read the old list
                self._num_changes[name] += 1

    def list_records(self) -> list[ScalarRecord]:
        """Return all numbers, as they were appended."""
        return [
            ScalarRecord(int(part["rank"][0]), {name: part[["step", "total", "weight"]].tolist()})
            for name, parts in list(self._parts.items())
            for part in list(parts)
        ]

    def _describe_names(self, name: str) -> str:
        """Return which name was probably meant, or what there is and how numbers get here."""
        if similar := difflib.get_close_matches(name, self._parts, n=1):
            return f"did you mean {similar[0]!r}?"
        logged = ", ".join(other for other in self._parts if not other.startswith(SYSTEM_PREFIX)) or "none"
        return f"there are {logged}. dtkit.log(name=number) in a loss adds some; history.column(...) has loss and times"

    def read(self, name: str, rank: int | None = None, since: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of one rank, or means over all ranks by weight. Raises ValueError for a wrong name.

        A repeated step counts once, with its last values. Steps before `since` are left out.
        """
        if name not in self._parts:
            raise ValueError(f"no numbers were logged as {name!r}; {self._describe_names(str(name))}")
        parts = [part for part in list(self._parts[name]) if part["step"][-1] >= since]
        rows = np.concatenate([np.empty(0, SCALAR_DTYPE), *parts])
        rows = rows[rows["step"] >= since]
        rows = rows if rank is None else rows[rows["rank"] == rank]
        _, last = np.unique(rows[["step", "rank"]][::-1], return_index=True)
        rows = rows[::-1][last]  # by step, then by rank
        if not len(rows):
            return np.empty(0, "i4"), np.empty(0)
        steps, first = np.unique(rows["step"], return_index=True)
        total, weight = (np.add.reduceat(rows[key], first) for key in ("total", "weight"))
        with np.errstate(invalid="ignore", divide="ignore"):
            return steps, total / weight

    def align(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return a value for each of a history's rows; NaN where nothing was logged."""
        values = np.full(len(rows), np.nan)
        for rank in np.unique(rows["rank"]):
            steps, logged = self.read(name, int(rank))
            of_rank = np.flatnonzero(rows["rank"] == rank)
            at = np.searchsorted(steps, rows["step"][of_rank])
            known = at < len(steps)
            known[known] = steps[at[known]] == rows["step"][of_rank][known]
            values[of_rank[known]] = logged[at[known]]
        return values


def raise_for_other_source(name: str, columns: Collection[str], evaluations: Iterable[Evaluation]) -> None:
    """Raise ValueError, with the call to use, for a series that dtkit records by itself and that nobody has logged.

    `columns` are those of a history's rows.
    """
    metrics = {metric for one in evaluations for metric in one.values}
    if source := _find_other_source(name, columns, metrics):
        raise ValueError(f"no numbers were logged as {name!r}; {source}")


def _find_other_source(name: str, columns: Collection[str], metrics: Collection[str]) -> str | None:
    column = _COLUMN_ALIASES.get(name, name)
    metric = name.removeprefix("val_").removeprefix("validation_")
    if name in _RATES:
        return "history.throughput() returns its steps and values"
    if column in columns:
        return f"history.column({column!r}) returns it for each step and rank"
    if metric in metrics:
        return f"it is a metric: [(e.step, e[{metric!r}]) for e in history.evaluations] has its steps and values"
    return None

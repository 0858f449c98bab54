"""Numbers that a training passed to `dtkit.log`, by name, rank and step.

They are few and arrive in any order. So each name has a table of its own next to the history's rows. A live view reads
them with each message, so the rows of a name are one array, and are in order mostly.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from typing import TYPE_CHECKING, Never

import numpy as np

from dtkit.history.growing_array import GrowingArray

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dtkit.types import Evaluation, Scalars

SYSTEM_PREFIX = "system/"
"""Prefix of the names that engines report of themselves."""

BETWEEN_PREFIX = "between steps/"
"""Prefix of the names of seconds between two steps, which verdicts read."""

OWN_PREFIXES = (SYSTEM_PREFIX, BETWEEN_PREFIX)
"""Prefixes of the names that `dtkit.log` refuses."""

CORE_WAIT_NAME = f"{SYSTEM_PREFIX}waiting for a core (%)"
"""Share of a training thread's time in which it was ready to run, but waited for a core."""

SCALAR_DTYPE = np.dtype([("step", "i4"), ("rank", "i4"), ("total", "f8"), ("weight", "f8")])
"""Row of one name, rank and step; the value is the total divided by the weight."""

_COLUMN_ALIASES = {"learning_rate": "lr", "gradient_norm": "grad_norm", "memory": "memory_bytes"}
OWN_SERIES = ("loss", "throughput")
"""Names that `History.scalar` reads without a call of `dtkit.log`."""

_RATES = ("samples/s", "samples_per_second")


@dataclasses.dataclass(frozen=True)
class ScalarRecord:
    """One rank's numbers of some steps, as a line of the run log."""

    rank: int
    scalars: Scalars


class _Table(GrowingArray):
    """Rows of one name, and where each record ends."""

    def __init__(self) -> None:
        super().__init__(SCALAR_DTYPE)
        self.ends: list[int] = []

    def add(self, record: np.ndarray) -> None:
        """Append one rank's numbers."""
        self.append(record)
        self.ends.append(len(self))

    def list_records(self) -> list[np.ndarray]:
        """Return the rows of each record."""
        ends = list(self.ends)
        return [self.read(start, stop) for start, stop in itertools.pairwise([0, *ends])]

    def read_all(self) -> np.ndarray:
        """Return all rows."""
        return self.read(0, len(self))


class NothingLoggedError(ValueError):
    """Nothing was logged under a name, nor under a similar one: the numbers of another run, or of later steps."""

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"no numbers were logged as {name!r}; {remedy}")
        self.name = name


class ScalarTables:
    """Tables of all names. One thread appends; others read."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._num_changes: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """Names in the order in which they were first logged."""
        return list(self._tables)

    def count_records(self, name: str) -> int:
        """Return how often numbers of this name were added or dropped."""
        return self._num_changes.get(name, 0)

    def add(self, record: ScalarRecord) -> None:
        """Append one rank's numbers."""
        for name, rows in record.scalars.items():
            part = np.zeros(len(rows), SCALAR_DTYPE)
            steps, totals, weights = zip(*rows, strict=True)
            part["step"], part["total"], part["weight"], part["rank"] = steps, totals, weights, record.rank
            self._tables.setdefault(name, _Table()).add(part)
            self._num_changes[name] = self.count_records(name) + 1

    def drop_from(self, step: int) -> None:
        """Drop the numbers of the steps from `step` on, which were undone."""
        for name, table in self._tables.items():
            if not (table.read_all()["step"] >= step).any():
                continue
            kept = _Table()  # other threads may read the old one
            for part in table.list_records():
                rows = part[part["step"] < step]
                if len(rows):
                    kept.add(rows)
            self._tables[name] = kept
            self._num_changes[name] += 1

    def list_records(self) -> list[ScalarRecord]:
        """Return all numbers, as they were appended."""
        return [
            ScalarRecord(int(part["rank"][0]), {name: part[["step", "total", "weight"]].tolist()})
            for name, table in list(self._tables.items())
            for part in table.list_records()
        ]

    def _refuse_name(self, name: str) -> Never:
        """Raise ValueError with the name that was probably meant, or with what there is and how numbers get here."""
        if similar := difflib.get_close_matches(name, self._tables, n=1):
            raise ValueError(f"no numbers were logged as {name!r}; did you mean {similar[0]!r}?")
        if similar := difflib.get_close_matches(name, OWN_SERIES, n=1):
            raise NothingLoggedError(name, f"did you mean {similar[0]!r}?")
        logged = ", ".join(other for other in self._tables if not other.startswith(OWN_PREFIXES)) or "none"
        remedy = (
            f"there are {logged}. dtkit.log(name=number) in a loss adds some; history.column(...) has loss and times"
        )
        raise NothingLoggedError(name, remedy)

    def read(self, name: str, rank: int | None = None, since: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of one rank, or means over all ranks by weight. Raises ValueError for a wrong name.

        A repeated step counts once, with its last values. Steps before `since` are left out.
        """
        if name not in self._tables:
            self._refuse_name(str(name))
        rows = self._tables[name].read_all()
        rows = rows[rows["step"] >= since] if since > 0 else rows
        rows = _keep_last(rows if rank is None else rows[rows["rank"] == rank])
        if not len(rows):
            return np.empty(0, "i4"), np.empty(0)
        first = np.flatnonzero(np.diff(rows["step"], prepend=-1))
        total, weight = (np.add.reduceat(rows[key], first) for key in ("total", "weight"))
        with np.errstate(invalid="ignore", divide="ignore"):
            return rows["step"][first], total / weight

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


def _keep_last(rows: np.ndarray) -> np.ndarray:
    """Return the last row of each step and rank, by step and then by rank."""
    place = (rows["step"].astype("i8") << 32) + rows["rank"]
    if not (np.diff(place) > 0).all():  # rows of several ranks in any order, or of steps that were taken again
        order = np.argsort(place, kind="stable")  # fast where rows are in order mostly
        is_last = np.diff(place[order], append=-1) != 0
        rows = rows[order[is_last]]
    return rows


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

"""Append-only table of all ranks' steps.

One writer (the run's driver thread) appends blocks. Any number of readers (figures, the live view, pandas) read rows by
index. So a view that remembers its last row fetches only new ones. Rows are in numpy chunks of fixed size, so an append
copies no earlier rows. Totals over the ranks (loss, samples, slowest rank) are computed as rows arrive.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util.arguments import check_no_folder, check_path, explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.completion import UserNames, hide_constructor, hide_from_completion
from dtkit._util.formatting import format_count
from dtkit._util.suffixes import JSON_LINES, check_suffix
from dtkit.history.growing_array import check_index, check_range
from dtkit.history.items import LogItem, encode_head, encode_line, read_lines
from dtkit.history.missing_steps import describe_missing_steps, find_missing_steps
from dtkit.history.row_table import RowTable
from dtkit.history.scalars import OWN_PREFIXES, SYSTEM_PREFIX, ScalarRecord, ScalarTables, raise_for_other_source
from dtkit.history.undone_steps import UndoneSteps, split_returns
from dtkit.types import Evaluation, Event, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pandas as pd

    from dtkit.history.history_log import HistoryLog
    from dtkit.history.workload import Workload

ROW_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("epoch", "i4"),
        ("rank", "i4"),
        ("samples", "i4"),
        ("loss", "f8"),
        ("weight", "f8"),
        ("lr", "f8"),
        ("data_s", "f4"),
        ("forward_s", "f4"),
        ("backward_s", "f4"),
        ("update_s", "f4"),
        ("step_s", "f4"),
        ("memory_bytes", "i8"),
        ("comm_s", "f4"),
        ("wait_s", "f4"),
        ("sent_bytes", "i8"),
        ("grad_norm", "f4"),
    ]
)
"""Row of one rank and step, in the order of :class:`~dtkit.types.StepRecord`."""


@hide_constructor
@explain_arguments
@suggest_attributes("history")
@hide_from_completion(
    "add", "append", "append_recorded", "close_run_log", "copy_until", "count_scalar_records", "extend"
)
@hide_from_completion(
    "directions", "list_scalar_records", "num_inherited_events", "num_totals", "num_valid_rows", "read_totals"
)
@hide_from_completion("read_position", "read_valid_rows", "read_valid_totals", "returns", "run_log", "version")
class History(metaclass=UserNames):
    """What each rank did in each step of a run. ``run.history`` is one, also while the run appends::

        steps, losses = run.history.loss()  # as arrays
        run.history.to_pandas().groupby("rank")["step_s"].median()
        run.history.to_jsonl("run.jsonl")
        history = dtkit.History.from_jsonl("run.jsonl")

    ``len(history)`` is the number of rows (one for each rank and step). Iterate over it or index it for
    :class:`~dtkit.types.StepRecord`. :meth:`column` returns a column as an array, and :meth:`to_pandas` a DataFrame.

    A run that goes back to a snapshot takes steps again. What was undone counts nowhere, but ``len``, an index,
    iteration and :meth:`rows` have every row that arrived.
    """

    num_inherited_events = 0
    """Number of events of the run whose checkpoint this one resumes."""
    run_log: HistoryLog | None = None
    """Log on disk to which the history is also written."""
    version = 0
    """Another number after each change, so that a reader knows whether its results are still the present ones."""
    directions: Mapping[str, bool] = MappingProxyType({})
    """Whether higher is better, for metrics that state it."""
    read_position: Callable[[], tuple[int, float]] | None = None
    """Returns the position of the run that writes this history."""

    def __init__(self, *, ranks_per_replica: int = 1) -> None:
        """Create an empty history. `ranks_per_replica` ranks share a replica, so they report the same samples."""
        self.ranks_per_replica = ranks_per_replica
        """Number of ranks that hold one replica together."""
        self._table = RowTable(ROW_DTYPE)
        self.events: list[Event] = []
        """Lines of the log, such as a pause or a lost engine."""
        self.evaluations: list[Evaluation] = []
        """Results on the validation data, the newest last."""
        self._scalars = ScalarTables()
        self.workload: Workload | None = None
        """Operations and tokens of a sample, once they were measured."""
        self._versions = itertools.count(1)

    # -- writing (the run's driver thread) --------------------------------------------------------------------

    def append(self, rows: np.ndarray | Iterable[StepRecord]) -> None:
        """Append rows of dtype :data:`ROW_DTYPE`, or records. One call has all ranks' rows of a step."""
        if not isinstance(rows, np.ndarray):
            rows = np.array([dataclasses.astuple(r) for r in rows], ROW_DTYPE)
        block = rows[np.argsort(rows["step"], kind="stable")]
        step = self._table.find_return(block)
        if step is not None:
            self.add(UndoneSteps(step))
        self._table.append(block, self.ranks_per_replica)
        self.version = next(self._versions)
        run_log = self.run_log
        if run_log is not None:
            run_log.append_rows(block)

    def append_recorded(self, rows: np.ndarray, items: Iterable[LogItem] = ()) -> None:
        """Append the rows and items of another history or log, each in order of arrival. The run may have gone back."""
        items = list(items)
        ends = [0, *(item.num_rows for item in items if isinstance(item, UndoneSteps)), len(rows)]
        parts = [rows[start:end] for start, end in itertools.pairwise(itertools.accumulate(ends, max))]
        self._append_arrived(parts.pop(0))
        for item in items:
            self.add(item)
            if isinstance(item, UndoneSteps):
                self._append_arrived(parts.pop(0))

    def _append_arrived(self, rows: np.ndarray) -> None:
        for part in split_returns(rows):
            self.append(part)

    def add(self, event: LogItem) -> None:
        """Add an item. An evaluation replaces an earlier one after the same number of steps.

        Undone steps count no more from here on, nor do their evaluations and logged numbers.
        """
        if isinstance(event, UndoneSteps):
            event = UndoneSteps(event.first, len(self))
        run_log = self.run_log
        if run_log is not None:
            run_log.append_event(event)
        self._keep(event)
        self.version = next(self._versions)

    def _keep(self, event: LogItem) -> None:
        if isinstance(event, Event):
            self.events.append(event)
            return
        if isinstance(event, ScalarRecord):
            self._scalars.add(event)
            return
        if isinstance(event, UndoneSteps):  # an evaluation's step is the number of steps before it
            self._table.undo_from(event.first)
            self.evaluations = [known for known in self.evaluations if known.step <= event.first]
            self._scalars.drop_from(event.first)
            return
        for k, known in enumerate(self.evaluations):
            if known.step == event.step:
                self.evaluations[k] = event
                return
        self.evaluations.append(event)

    def close_run_log(self) -> None:
        """Stop writing to the run log, and close it."""
        run_log, self.run_log = self.run_log, None
        if run_log is not None:
            run_log.close()

    def extend(self, other: History) -> None:
        """Append another history, that of the run which this one continues."""
        self._table.extend(other._table)
        self.events += other.events
        self.evaluations += other.evaluations
        for record in other.list_scalar_records():
            self._scalars.add(record)
        self.version = next(self._versions)

    def copy_until(self, rows: int, events: int, evaluations: int) -> History:
        """Return a copy of the first `rows`, `events` and `evaluations`."""
        copy = History(ranks_per_replica=self.ranks_per_replica)
        copy.append_recorded(self.rows(0, rows), [back for back in self.returns if back.num_rows <= rows])
        copy.events, copy.directions = self.events[:events], dict(self.directions)
        copy.evaluations = self.evaluations[:evaluations]
        last_step = int(copy.column("step").max(initial=-1))
        for record in self.list_scalar_records():
            kept = {name: [n for n in numbers if n[0] <= last_step] for name, numbers in record.scalars.items()}
            copy.add(ScalarRecord(record.rank, {name: numbers for name, numbers in kept.items() if numbers}))
        return copy

    def __len__(self) -> int:
        return len(self._table)

    def rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows `start` to `stop` in order of arrival, of dtype :data:`ROW_DTYPE`. Do not write to them.

        After the run went back to a snapshot, steps that were undone are among them; :meth:`to_pandas` leaves them out.
        """
        check_range("rows", start, stop)
        return self._table.read(start, stop)

    def totals(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return a row for each step, of dtype :data:`TOTAL_DTYPE`; the loss is the weighted mean.

        Steps that were undone, because the run went back to a snapshot, are left out.
        """
        check_range("totals", start, stop)
        return self._table.read_valid_totals(start, stop).copy()

    def read_totals(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return a row for each step as it arrived, also of those that were undone later."""
        return self._table.read_totals(start, stop)

    def read_valid_totals(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the rows of :meth:`totals` without a copy, for views that ask often. Do not write to them."""
        return self._table.read_valid_totals(start, stop)

    def read_valid_rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows `start` to `stop` of those that were not undone."""
        return self._table.read_valid(start, stop)

    @property
    def num_valid_rows(self) -> int:
        """Number of rows without those of undone steps."""
        return self._table.num_valid

    @property
    def returns(self) -> Sequence[UndoneSteps]:
        """What was undone, in this order. After a new one, a reader must read the valid rows again."""
        return self._table.returns

    @property
    def num_steps(self) -> int:
        """Number of recorded steps, without those that were undone."""
        return self._table.num_valid_totals

    @property
    def num_totals(self) -> int:
        """Number of rows that `read_totals` returns."""
        return self._table.num_totals

    @property
    def position(self) -> tuple[int, float]:
        """Steps that the run has taken, and its seconds without pauses, as every view shows them.

        Steps before the run was resumed, or of a lost engine, have no record.
        """
        if self.read_position is not None:
            return self.read_position()
        last = self._table.read_valid_totals(self.num_steps - 1)["step"]
        return int(last.max(initial=-1)) + 1, float(self.read_totals()["step_s"].sum())  # undone steps took time, too

    @property
    def num_ranks(self) -> int:
        """Number of ranks, by the highest one; 0 before the first step."""
        return max(self.ranks, default=-1) + 1

    @property
    def ranks(self) -> list[int]:
        """Ranks that have rows."""
        return self._table.ranks

    def find_lost_steps(self, rank: int | None = None) -> list[tuple[int, int]]:
        """Return (first, last) of each range of steps whose rows went with an engine: one rank's, or all."""
        if not any(event.kind == "lost" for event in self.events):
            return []
        return find_missing_steps((self.totals() if rank is None else self._select_rank(rank))["step"])

    def column(self, name: str) -> np.ndarray:
        """Return a column of :meth:`to_pandas`: a part of :class:`~dtkit.types.StepRecord`, or of `dtkit.log`."""
        if name in self.scalar_names:
            return self._scalars.align(name, self.read_valid_rows())
        if name not in (ROW_DTYPE.names or ()):
            names = [*(ROW_DTYPE.names or ()), *self.scalar_names]
            similar = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"the columns are {', '.join(names)}"
            raise ValueError(f"no column {name!r}; {hint}")
        return self.read_valid_rows()[name].copy()

    @property
    def scalar_names(self) -> list[str]:
        """Names of the numbers passed to `dtkit.log`."""
        return [name for name in self._scalars.names if not name.startswith(OWN_PREFIXES)]

    @property
    def system_names(self) -> list[str]:
        """Names of the numbers on the engines' machines, such as ``system/CPU (cores)``; for :meth:`scalar`."""
        return [name for name in self._scalars.names if name.startswith(SYSTEM_PREFIX)]

    def count_scalar_records(self, name: str) -> int:
        """Return how often numbers of this name were added or dropped, so that a reader knows of a change."""
        return self._scalars.count_records(name)

    def scalar(self, name: str, rank: int | None = None, *, since: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) that one rank passed to `dtkit.log`, or the mean over all ranks by samples.

        Steps before `since` are left out. "loss" and "throughput" need no call of `dtkit.log`.
        """
        own = {"loss": self.loss, "throughput": self.throughput}.get(name)
        if own is not None and name not in self._scalars.names:
            steps, values = own(rank)
            return steps[steps >= since], values[steps >= since]
        if name not in self._scalars.names:
            raise_for_other_source(str(name), ROW_DTYPE.names or (), self.evaluations)
        return self._scalars.read(name, rank, since)

    def list_scalar_records(self) -> list[ScalarRecord]:
        """Return all numbers from `dtkit.log`, for a log or another history."""
        return self._scalars.list_records()

    def __getitem__(self, index: int) -> StepRecord:
        check_index(index, len(self))
        index %= len(self)
        return StepRecord(*self.rows(index, index + 1)[0].item())

    def __iter__(self) -> Iterator[StepRecord]:
        for row in self.rows():
            yield StepRecord(*row.item())

    def loss(self, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, losses) of one rank, or the mean over all ranks, weighted like the gradients."""
        if rank is None:
            total = self.totals()
            return total["step"], total["loss"]
        rows = self._select_rank(rank)
        return rows["step"], rows["loss"]

    def throughput(self, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, samples per second in each step) of one rank, or of all: over the slowest rank's time."""
        table = self.totals() if rank is None else self._select_rank(rank)
        with np.errstate(divide="ignore", invalid="ignore"):
            return table["step"], table["samples"] / table["step_s"]

    def _select_rank(self, rank: int) -> np.ndarray:
        rows = self.read_valid_rows()
        selected: np.ndarray = rows[rows["rank"] == rank]
        is_number = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
        if not is_number or (len(rows) and not len(selected)):
            raise ValueError(f"rank={rank!r}; there are rows of rank {', '.join(map(str, self.ranks))}")
        return selected

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each rank and step. Needs pandas.

        Steps that were undone, because the run went back to a snapshot, are left out.
        """
        import pandas as pd

        rows = self.read_valid_rows()
        return pd.DataFrame(rows).assign(**{name: self._scalars.align(name, rows) for name in self.scalar_names})

    def to_jsonl(self, path: str | Path) -> None:
        """Write rows, evaluations and events, one JSON object on each line. :meth:`from_jsonl` reads them."""
        check_path(path)
        check_no_folder("to_jsonl", path)
        check_suffix("to_jsonl(", path, JSON_LINES)
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise FileNotFoundError(f"{str(path)!r}: the folder {folder} does not exist. Create it, or name another")
        with Path(path).open("w", encoding="utf-8") as file:
            file.write(encode_head(self.ranks_per_replica, self.position, self.directions))
            for items in (self, self.returns, self.evaluations, self.events, self.list_scalar_records()):
                file.writelines(map(encode_line, items))

    @classmethod
    def from_jsonl(cls, path: str | Path) -> History:
        """Read a file that :meth:`to_jsonl` wrote. Raises FileNotFoundError, and ValueError for another file."""
        check_path(path)
        check_no_folder("from_jsonl", path)
        if not Path(path).is_file():
            raise FileNotFoundError(f"{str(path)!r}: there is no such file. history.to_jsonl(path) writes one")
        head, rows, items = read_lines(Path(path))
        history = cls(ranks_per_replica=head.get("copies", 1))
        history.directions = head.get("directions", {})
        if "steps" in head:
            history.read_position = functools.partial(tuple, (head["steps"], head["elapsed_s"]))
        history.append_recorded(np.array([dataclasses.astuple(row) for row in rows], ROW_DTYPE), items)
        return history

    def __repr__(self) -> str:
        if not self.num_steps:
            return "History(empty)"
        missing = describe_missing_steps(self.totals()["step"])
        counts = {"row": self.num_valid_rows, "step": self.num_steps, "rank": len(self.ranks)}
        parts = [format_count(count, noun) for noun, count in counts.items()]
        parts += [f"{missing} missing"] if missing else []
        return f"History({', '.join(parts)}, last loss {self.loss()[1][-1]:.4g})"

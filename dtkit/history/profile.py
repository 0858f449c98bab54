"""Profile of some steps on all ranks: the operators by time, and one trace in the format of Chrome's tracing."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import views
from dtkit._util.arguments import check_path, explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.suffixes import COMPRESSED_TRACE, check_suffix

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

    from dtkit._util.views import Figure


@dataclasses.dataclass(frozen=True)
class OperatorTime:
    """Calls of one operator on one rank. Time in operators that it calls counts for those."""

    name: str
    calls: int
    cpu_s: float
    device_s: float
    """Seconds on the rank's GPU."""

    @property
    def self_s(self) -> float:
        """Seconds on the GPU if it ran there, else on the CPU."""
        return self.device_s or self.cpu_s


def merge_operators(operators: Iterable[OperatorTime]) -> tuple[OperatorTime, ...]:
    """Return one entry for each operator, the longest first.

    torch lists a node of the backward graph twice: as the node, and as its evaluation by the engine, which calls it.
    Each has time of its own, and they have the same calls.
    """
    merged: dict[str, OperatorTime] = {}
    for operator in operators:
        name = _remove_prefixes(operator.name)
        other = merged.get(name, OperatorTime(name, 0, 0.0, 0.0))
        merged[name] = OperatorTime(
            name,
            max(operator.calls, other.calls),
            operator.cpu_s + other.cpu_s,
            operator.device_s + other.device_s,
        )
    return tuple(sorted(merged.values(), key=lambda operator: -operator.self_s))


def _remove_prefixes(name: str) -> str:
    """Return an operator's name without the prefixes that torch gives to nodes of the backward graph."""
    return name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("torch::autograd::")


@dataclasses.dataclass(frozen=True)
class RankProfile:
    """One rank's profile."""

    operators: tuple[OperatorTime, ...]
    """The longest first."""
    packed_trace: bytes
    """Trace of the rank alone, as JSON, compressed by gzip."""
    clock_shift_us: float
    """Microseconds to add to times of the trace for those of the rank's clock."""


@dataclasses.dataclass(frozen=True)
class OperatorRow:
    """One operator on all ranks."""

    name: str
    calls: int
    """Over all ranks."""
    share: float
    """Of the time in all operators, over all ranks."""
    self_s: tuple[float, ...]
    """Seconds by rank."""


@suggest_attributes("profile")
@explain_arguments
@dataclasses.dataclass(frozen=True, repr=False)
class Profile:
    """Operators of some steps on all ranks. A cell shows the table; :meth:`export_chrome_trace` writes the trace."""

    name: str
    first_step: int
    num_steps: int
    ranks: Sequence[RankProfile]
    clock_offsets: Sequence[float] | None = None
    """Lead of each rank's clock in seconds; None on one host."""

    @property
    def operators(self) -> list[OperatorRow]:
        """Operators by their time over all ranks, the longest first."""
        by_rank = [{operator.name: operator for operator in rank.operators} for rank in self.ranks]
        total = sum(operator.self_s for rank in self.ranks for operator in rank.operators)
        names = dict.fromkeys(name for operators in by_rank for name in operators)
        rows = [_make_row(name, by_rank, total) for name in names]
        return sorted(rows, key=lambda row: -sum(row.self_s))

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each operator and rank. Needs pandas."""
        import pandas as pd

        rows = [
            {"rank": rank, **dataclasses.asdict(operator)}
            for rank, profile in enumerate(self.ranks)
            for operator in profile.operators
        ]
        return pd.DataFrame(rows)

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write one trace of all ranks, each a process in it, for https://ui.perfetto.dev; compressed for a ".gz"."""
        check_path(path)
        check_suffix("export_chrome_trace(", path, COMPRESSED_TRACE)
        text = json.dumps(merge_traces(self.ranks, self.clock_offsets)).encode()
        path = Path(path)
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)

    def figure(self) -> Figure:
        """Return the longest operators as a figure: a bar for each rank."""
        return views.draw(self)

    def __repr__(self) -> str:
        return views.format_text(self)

    def _repr_html_(self) -> str:
        return views.format_html(self)


def _make_row(name: str, by_rank: Sequence[Mapping[str, OperatorTime]], total_s: float) -> OperatorRow:
    times = [operators.get(name) for operators in by_rank]
    seconds = tuple(0.0 if operator is None else operator.self_s for operator in times)
    calls = sum(operator.calls for operator in times if operator is not None)
    return OperatorRow(name, calls, sum(seconds) / total_s if total_s else 0.0, seconds)


def merge_traces(ranks: Sequence[RankProfile], clock_offsets: Sequence[float] | None) -> dict[str, Any]:
    """Return one trace on the clock of rank 0, which begins at 0."""
    events: list[dict[str, Any]] = []
    for rank, profile in enumerate(ranks):
        trace = json.loads(gzip.decompress(profile.packed_trace))
        ahead_us = 0.0 if clock_offsets is None else 1e6 * clock_offsets[rank]
        events += _move_events(trace["traceEvents"], rank, profile.clock_shift_us - ahead_us)
    start = min((event["ts"] for event in events if event["ph"] != "M"), default=0.0)
    for event in events:
        event["ts"] = 0.0 if event["ph"] == "M" else event["ts"] - start
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_PROCESSES_PER_RANK = 100  # room for a rank's threads, its GPUs, and the profiler's own rows


def _move_events(events: Sequence[dict[str, Any]], rank: int, shift_us: float) -> list[dict[str, Any]]:
    """Return a rank's events with numbers of processes and of arrows that no other rank has, on a shifted clock."""
    processes = {
        process: rank * _PROCESSES_PER_RANK + k for k, process in enumerate(dict.fromkeys(e.get("pid") for e in events))
    }
    moved_events = []
    for event in events:
        copy = {**event, "pid": processes[event.get("pid")], "ts": float(event.get("ts", 0.0)) + shift_us}
        if "id" in event:
            copy["id"] = f"{rank}.{event['id']}"
        if event["ph"] == "M" and event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        moved_events.append(copy)
    names = {event.get("pid"): event["args"].get("labels") for event in events if event.get("name") == "process_labels"}
    for process, number in processes.items():
        label = f"node {rank}" + (f", {names[process]}" if names.get(process) else "")
        common = {"ph": "M", "pid": number, "tid": 0}
        moved_events.append({**common, "name": "process_name", "args": {"name": label}})
        moved_events.append({**common, "name": "process_sort_index", "args": {"sort_index": number}})
    return moved_events

"""What ranks report, made into a run's history: rows of steps, what was printed, and what only all ranks tell together.

Ranks that failed with others may stand a step apart. What all of them completed is recorded at once; what some did
beyond that is kept until it is known from where all go on.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.history import comm_time, message_times
from dtkit.history.engine_outbox import format_output
from dtkit.types import DispatchResult, Evaluation, Event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.history.engine_outbox import EvaluationSums, UnreadDispatches
    from dtkit.history.history import History
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.types import Reply


class Recorder:
    """Writes one run's history."""

    def __init__(self, engine_group: EngineGroup, history: History) -> None:
        self._engine_group, self._history = engine_group, history
        self._extra_rows: list[np.ndarray] = []  # rows of the ranks that were further than others when one failed
        self._has_reported_write_error = False

    @property
    def next_step(self) -> int:
        """The step that the history ends before."""
        totals = self._history.totals(self._history.num_steps - 1)
        return int(totals["step"][-1]) + 1 if len(totals) else 0

    def add_event(self, step: int, kind: str, text: str, rank: int | None = None) -> None:
        """An event."""
        self._history.add(Event(step, kind, text, time.time(), rank))

    def record_steps(
        self, values: Sequence[tuple[DispatchResult, Sequence[Any]]], ranks: Sequence[int] | None = None
    ) -> None:
        """What ranks did in a dispatch, and said meanwhile: all of them, by rank, unless `ranks` says whose it is."""
        ranks = range(len(values)) if ranks is None else ranks
        advances = [advance for advance, _ in values]
        rows = [np.asarray(advance.rows) for advance in advances]
        self._split_blocked_time(rows, advances, ranks)
        self._history.append(np.concatenate(rows))
        step = int(rows[0]["step"][0]) if len(rows[0]) else advances[0].step
        for rank, (_, items) in zip(ranks, values, strict=True):
            for item in items:
                self.add_event(step, "print", format_output(*item), rank)
        self._report_write_error(step)

    def _report_write_error(self, step: int) -> None:
        """Say once that a disk does not take the history, and once that it does again."""
        spool = self._history.run_log
        if spool is None or (spool.write_error is not None) == self._has_reported_write_error:
            return
        self._has_reported_write_error = not self._has_reported_write_error
        if self._has_reported_write_error:
            why = f"{spool.write_error}: {spool.folder}. It is kept in memory until there is room"
            self.add_event(step, "error", f"the history can't be written to disk, for who takes this run over: {why}")
        else:
            self.add_event(step, "note", "the history is on disk again")

    def record_unread(self, unread_dispatches: Mapping[int, UnreadDispatches], common_step: int) -> None:
        """What dispatches left that nobody may have read, by rank. All ranks that are there have taken `common` steps:
        what they did until then is recorded, with what lost ranks left of it.
        """
        seen = self.next_step
        dispatches: dict[int, dict[int, tuple[DispatchResult, list[Any]]]] = {}
        for rank in sorted(unread_dispatches):
            for advance, items in unread_dispatches[rank]:
                if advance.step > seen:
                    begun = advance.step - len(np.asarray(advance.rows))
                    dispatches.setdefault(begun, {})[rank] = _slice_steps(advance, seen, advance.step), items
        for begun in sorted(dispatches):
            self._record_until(common_step, dispatches[begun])

    def record_unread_evaluations(
        self, unread_evaluations: Mapping[int, Mapping[int, EvaluationSums]], due_steps: Sequence[int]
    ) -> list[int]:
        """What evaluations left that nobody may have read, by rank: those that all ranks made are recorded.

        Of the steps after which they were `due`, those for which there is none.
        """
        known = {one.step for one in self._history.evaluations}
        for step in sorted(set.intersection(*(set(found) for found in unread_evaluations.values())) - known):
            parts = [unread_evaluations[rank][step] for rank in sorted(unread_evaluations)]
            if len({tuple(sums) for _, sums in parts}) == 1:
                self.record_evaluation(step, parts)
                known.add(step)
        return [step for step in due_steps if step not in known]

    def record_evaluation(self, step: int, parts: Sequence[EvaluationSums]) -> None:
        """What all ranks found in their parts of the held-out data."""
        found = combine_evaluations(step, parts)
        self._history.add(found)
        self.add_event(step, "note", ", ".join(f"valid {name} {value:.4g}" for name, value in found.values.items()))

    def _split_blocked_time(
        self, rows: Sequence[np.ndarray], advances: Sequence[DispatchResult], ranks: Sequence[int]
    ) -> None:
        """Of the time that ranks were blocked, tell apart what they waited for each other."""
        spans = [advance.blocked_spans for advance in advances]
        if any(span is None for span in spans):
            return
        steps = min(map(len, rows))
        clocks = self._engine_group.clock_offsets
        ahead = None if clocks is None else [clocks[rank] for rank in ranks]
        waits, transfers = comm_time.split_blocked_time([np.asarray(span)[:steps] for span in spans], ahead)
        sent = _split_message_time(
            [part[:steps] for part in rows], advances, ranks, self._history.ranks_per_replica, ahead
        )
        for mine, *found in zip(rows, waits, transfers, *sent, strict=True):
            wait, transfer, waited, moved = found
            mine["wait_s"][:steps] = wait + waited
            mine["comm_s"][:steps] = transfer + moved

    # -- after a failure --------------------------------------------------------------------------------------

    def clear_extra_rows(self) -> None:
        """Some rank has failed: nothing is known of who stands further."""
        self._extra_rows.clear()

    def record_common_steps(self, replies: Mapping[int, Reply]) -> int | None:
        """Record the steps that all ranks completed before one failed: the step after them, None where none is known.

        `replies` by rank. Of a lost rank nobody knows.
        """
        known = {r: reply for r, reply in replies.items() if reply.failure is None or not reply.failure.is_engine_gone}
        found: list[Any] = [reply.value for reply in known.values() if isinstance(reply.value, tuple)]
        found = [value for value in found if isinstance(value[0], DispatchResult)]
        if not found or len(found) < len(known):
            return None
        common: int = min(advance.step for advance, _ in found)
        self._record_until(common, dict(zip(known, found, strict=True)))
        return common

    def _record_until(self, common_step: int, values: Mapping[int, tuple[DispatchResult, Sequence[Any]]]) -> None:
        """Record what ranks did in a dispatch before step `common`; what some did beyond may be of use later."""
        self.record_steps(
            [(_slice_steps(advance, 0, common_step), items) for advance, items in values.values()], list(values)
        )
        self._extra_rows += [
            np.asarray(_slice_steps(advance, common_step, advance.step).rows) for advance, _ in values.values()
        ]

    def record_extra_rows(self, step: int) -> None:
        """All go on from `step`, where some were and others not: record what those did."""
        rows = [part[part["step"] < step] for part in self._extra_rows]
        self._extra_rows.clear()
        if any(map(len, rows)):
            self._history.append(np.concatenate(rows))


def _split_message_time(
    rows: Sequence[np.ndarray],
    advances: Sequence[DispatchResult],
    ranks: Sequence[int],
    ranks_per_pipeline: int,
    clock_offsets: Sequence[float] | None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(waited, moved) in seconds, of each rank an array by step: what it waited for in messages, and the rest of them.

    `per` is how many ranks a pipeline has.
    """
    parts = [
        np.empty(0, message_times.MESSAGE_DTYPE) if a.messages is None else np.asarray(a.messages) for a in advances
    ]
    waited, moved = [], []
    for mine, part, seconds in zip(
        rows, parts, message_times.compute_wait_seconds(parts, ranks, ranks_per_pipeline, clock_offsets), strict=True
    ):
        at = part["step"] - (mine["step"][0] if len(mine) else 0)
        known = (at >= 0) & (at < len(mine))  # of those that all ranks completed
        waited.append(np.bincount(at[known], seconds[known], len(mine)))
        moved.append(np.bincount(at[known], (part["end"] - part["begin"] - seconds)[known], len(mine)))
    return waited, moved


def _slice_steps(advance: DispatchResult, first: int, stop: int) -> DispatchResult:
    """What was done in these steps."""
    rows = np.asarray(advance.rows)
    inside = (rows["step"] >= first) & (rows["step"] < stop)
    blocked = None if advance.blocked_spans is None else np.asarray(advance.blocked_spans)[inside]
    return dataclasses.replace(advance, rows=rows[inside], blocked_spans=blocked)


def combine_evaluations(step: int, parts: Sequence[EvaluationSums]) -> Evaluation:
    """Add up what every rank found in its part: (samples, {name: (sum, weight)})."""
    names = parts[0][1]
    values = {}
    for name in names:
        total, weight = (sum(part[1][name][k] for part in parts) for k in (0, 1))
        values[name] = total / weight if weight else math.nan
    return Evaluation(step, sum(part[0] for part in parts), values)

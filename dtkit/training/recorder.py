"""The recorder of a run's history: rows of steps, printed lines, and values computed from all ranks' results.

After a failure, ranks may be at different steps. The steps that all ranks have completed are recorded at once. Later
steps of single ranks are kept until the common step from which all continue is known.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting
from dtkit.history import comm_time, engine_outbox
from dtkit.history.engine_outbox import format_output
from dtkit.history.missing_steps import describe_missing_steps
from dtkit.history.scalars import ScalarRecord
from dtkit.history.timeline import Timeline, merge_spans
from dtkit.messages import DispatchResult
from dtkit.training.boundary_times import BoundaryTimeRecorder
from dtkit.training.core_use_watch import CoreUseWatch
from dtkit.training.divergence_watch import DivergenceWatch
from dtkit.types import Evaluation, Event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.history.engine_outbox import EvaluationSums, UnreadDispatches
    from dtkit.history.history import History
    from dtkit.messages import Reply
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.schedules.schedule import Schedule
    from dtkit.types import Scalars


class Recorder:
    """Writes one run's history."""

    def __init__(self, engine_group: EngineGroup, history: History) -> None:
        self._engine_group, self._history = engine_group, history
        self._extra_rows: list[np.ndarray] = []  # rows of ranks that were ahead when one failed
        self._extra_scalars: list[ScalarRecord] = []
        self._has_reported_write_error = False
        self._divergence_watch = DivergenceWatch(history)
        self._core_use_watch = CoreUseWatch(engine_group, history)
        self.boundary_times = BoundaryTimeRecorder(history)
        """Recorder of the time between steps."""
        self._recent_spans: list[np.ndarray] = []
        self._recent_clock_offsets: list[float] | None = None

    @property
    def next_step(self) -> int:
        """The first step that is not in the history."""
        totals = self._history.totals(self._history.num_steps - 1)
        return int(totals["step"][-1]) + 1 if len(totals) else 0

    def get_stored_step(self, step: int) -> int:
        """Return `step`, until which the history is recorded; 0 while a part of it is in memory alone.

        Engines keep the results of later steps for another notebook.
        """
        run_log = self._history.run_log
        return step if run_log is None or run_log.write_error is None else 0

    def add_event(self, step: int, kind: str, text: str, rank: int | None = None, *, notice: str | None = None) -> None:
        """Add an event."""
        self._history.add(Event(step, kind, text, time.time(), rank, notice))

    def record_steps(
        self,
        values: Sequence[tuple[DispatchResult, Sequence[Any]]],
        ranks: Sequence[int] | None = None,
        *,
        is_first_of_message: bool = True,
    ) -> None:
        """Record the steps and printed lines of a dispatch, by rank, for all ranks or for `ranks`."""
        ranks = range(len(values)) if ranks is None else ranks
        advances = [advance for advance, _ in values]
        rows = [np.asarray(advance.rows) for advance in advances]
        self._keep_spans(advances, ranks)
        self._split_blocked_time(rows, advances, ranks)
        expected_step = self.next_step if len(self._history) else None
        self._history.append(np.concatenate(rows))
        if expected_step is not None and len(rows[0]) and rows[0]["step"][0] > expected_step:
            self.note_missing_steps(int(rows[0]["step"][0]))
        for rank, advance in zip(ranks, advances, strict=True):
            if advance.scalars:
                self._history.add(ScalarRecord(rank, advance.scalars))
        step = int(rows[0]["step"][0]) if len(rows[0]) else advances[0].step
        for rank, (_, items) in zip(ranks, values, strict=True):
            for item in items:
                self.add_event(step, "print", format_output(*item), rank)
        if len(rows[0]):
            self.boundary_times.record(step, advances, is_first_of_message=is_first_of_message)
        self._core_use_watch.update(zip(ranks, advances, strict=True))
        self._report_write_error(step)
        divergence = self._divergence_watch.find_new()
        if divergence is not None:
            self.add_event(self.next_step, "diverged", divergence.text)

    def _keep_spans(self, advances: Sequence[DispatchResult], ranks: Sequence[int]) -> None:
        """Keep what each rank did when in the last steps, and how far its clock is ahead."""
        known = [
            (rank, np.asarray(part.spans)) for rank, part in zip(ranks, advances, strict=True) if part.spans is not None
        ]
        if any(len(spans) for _, spans in known):
            offsets = self._engine_group.membership.clock_offsets
            self._recent_spans = [spans for _, spans in known]
            self._recent_clock_offsets = None if offsets is None else [offsets[rank] for rank, _ in known]

    def merge_recent_spans(self) -> np.ndarray:
        """Return what each rank did when in the last steps that all of them completed, on one clock."""
        return merge_spans(self._recent_spans, self._recent_clock_offsets)

    def make_timeline(self, schedule: Schedule | None, name: str) -> Timeline:
        """Return the picture of the last steps of a run of this name."""
        spans = comm_time.split_message_waits(self.merge_recent_spans(), self._history.ranks_per_replica)
        return Timeline(comm_time.split_collective_waits(spans), schedule=schedule, title=f" of {name}")

    def restore_spans(self, spans: np.ndarray) -> None:
        """Restore the spans of another notebook, on one clock, unless engines kept those of later steps."""
        if spans["step"].max(initial=-1) <= self.merge_recent_spans()["step"].max(initial=-1):
            return
        self._recent_spans, self._recent_clock_offsets = [spans], None

    def _report_write_error(self, step: int) -> None:
        """Log once if the history can't be written to disk, and once when it can be written again."""
        run_log = self._history.run_log
        if run_log is None or (run_log.write_error is not None) == self._has_reported_write_error:
            return
        self._has_reported_write_error = not self._has_reported_write_error
        if self._has_reported_write_error:
            reason = f"{run_log.write_error}: {run_log.folder}. It is kept in memory until there is room"
            text = f"the history can't be written to disk, for a notebook that takes this run over: {reason}"
            self.add_event(step, "error", text)
        else:
            self.add_event(step, "note", "the history is on disk again")

    def record_unread(self, unread_dispatches: Mapping[int, UnreadDispatches], common_step: int) -> None:
        """Record the results that engines kept, by rank, up to `common_step`, which all remaining ranks have reached.

        These include results that lost ranks kept.
        """
        first_unread = self.next_step
        dispatches: dict[int, dict[int, tuple[DispatchResult, list[Any]]]] = {}
        for rank in sorted(unread_dispatches):
            for advance, items in unread_dispatches[rank]:
                if advance.step > first_unread:
                    first = advance.step - len(np.asarray(advance.rows))
                    dispatches.setdefault(first, {})[rank] = _slice_steps(advance, first_unread, advance.step), items
        for first in sorted(dispatches):
            self._record_until(common_step, dispatches[first])

    def record_unread_evaluations(
        self, unread_evaluations: Mapping[int, Mapping[int, EvaluationSums]], due_steps: Sequence[int], step: int
    ) -> None:
        """Record the evaluations that engines kept, by rank, if all ranks have made them.

        The log at `step` names the steps among `due_steps` that have none.
        """
        known = {evaluation.step for evaluation in self._history.evaluations}
        for at in sorted(set.intersection(*map(set, unread_evaluations.values())) - known):
            parts = [unread_evaluations[rank][at] for rank in sorted(unread_evaluations)]
            if len({tuple(sums) for _, sums in parts}) == 1:
                self.record_evaluation(at, parts)
                known.add(at)
        if missing := [at for at in due_steps if at not in known]:
            steps = ", ".join(map(str, missing))
            self.add_event(step, "note", f"what evaluations found after these steps was lost: {steps}")

    def record_evaluation(self, step: int, parts: Sequence[EvaluationSums]) -> None:
        """Record an evaluation from the sums of all ranks."""
        evaluation = combine_evaluations(step, parts)
        self._history.add(evaluation)
        values = ", ".join(f"{name} {formatting.format_loss(value)}" for name, value in evaluation.values.items())
        self.add_event(step, "evaluation", f"validation {values}")

    def _split_blocked_time(
        self, rows: Sequence[np.ndarray], advances: Sequence[DispatchResult], ranks: Sequence[int]
    ) -> None:
        """Split the ranks' blocked time into waiting for each other and communication."""
        spans = [advance.blocked_spans for advance in advances]
        if any(span is None for span in spans):
            return
        steps = min(map(len, rows))
        clocks = self._engine_group.membership.clock_offsets
        ahead = None if clocks is None else [clocks[rank] for rank in ranks]
        waits, transfers = comm_time.split_blocked_time([np.asarray(span)[:steps] for span in spans], ahead)
        message_times = _split_message_time(
            [part[:steps] for part in rows], advances, ranks, self._history.ranks_per_replica, ahead
        )
        for part, *seconds in zip(rows, waits, transfers, *message_times, strict=True):
            wait, transfer, message_wait, message_transfer = seconds
            part["wait_s"][:steps] = wait + message_wait
            part["comm_s"][:steps] = transfer + message_transfer

    # -- after a failure --------------------------------------------------------------------------------------

    def clear_extra_rows(self) -> None:
        """Forget the rows beyond the common step, because of another failure."""
        self._extra_rows.clear()
        self._extra_scalars.clear()

    def record_common_steps(
        self, replies: Mapping[int, Reply[Any]], unread_dispatches: Mapping[int, UnreadDispatches] | None = None
    ) -> int | None:
        """Record the steps that all ranks completed before one failed; return the step after them.

        Returns None if a rank's reply has no steps. `replies` is by rank; lost ranks don't count. Their rows of the
        same dispatch are recorded if they are among `unread_dispatches`.
        """
        known = {r: reply for r, reply in replies.items() if reply.failure is None or not reply.failure.is_engine_gone}
        values: list[Any] = [reply.value for reply in known.values() if isinstance(reply.value, tuple)]
        values = [value for value in values if isinstance(value[0], DispatchResult)]
        if not values or len(values) < len(known):
            return None
        common_step: int = min(advance.step for advance, _ in values)
        found = dict(zip(known, values, strict=True))
        first_steps = {int(step) for advance, _ in values for step in np.asarray(advance.rows)["step"][:1]}
        for rank, dispatches in (unread_dispatches or {}).items():
            for advance, items in dispatches:
                if np.asarray(advance.rows)["step"][0] in first_steps:
                    found[rank] = advance, items
        self._record_until(common_step, found)
        return common_step

    def _record_until(self, common_step: int, values: Mapping[int, tuple[DispatchResult, Sequence[Any]]]) -> None:
        """Record the steps of a dispatch before `common_step`, and keep later ones, which may be needed."""
        self.record_steps(
            [(_slice_steps(advance, 0, common_step), items) for advance, items in values.values()], list(values)
        )
        for rank, (advance, _) in values.items():
            beyond = _slice_steps(advance, common_step, advance.step)
            self._extra_rows.append(np.asarray(beyond.rows))
            self._extra_scalars.append(ScalarRecord(rank, beyond.scalars))

    def fill_gap(self, job: str, step: int) -> None:
        """Record the steps before `step`, where all ranks are, whose results no reply brought.

        Engines keep them on disk. The log names those that are not there either.
        """
        self.record_extra_rows(step)
        if not len(self._history) or self.next_step >= step:
            return
        folder, ranks = self._engine_group.folder, range(self._engine_group.world_size)
        self.record_unread({rank: engine_outbox.read_dispatches(folder, job, rank) for rank in ranks}, step)
        self.note_missing_steps(step)

    def record_before_rebuild(self, job: str, step: int) -> None:
        """Record what ranks did before `step`, from which a recovery continues: it ends what the engines keep."""
        folder, ranks = self._engine_group.folder, range(self._engine_group.world_size)
        known = {(int(row["rank"]), int(row["step"])) for part in self._extra_rows for row in part}
        first_unread = self.next_step
        for rank in ranks:
            for result, _ in engine_outbox.read_dispatches(folder, job, rank):
                rows = np.asarray(result.rows)
                is_new = [at >= first_unread and (rank, at) not in known for at in rows["step"].tolist()]
                self._extra_rows.append(rows[np.array(is_new, bool)])
        self.record_extra_rows(step)

    def note_missing_steps(self, step: int) -> None:
        """Name in the log the steps before `step` that the history lacks, if there are new ones."""
        missing = describe_missing_steps(self._history.totals()["step"], step)
        text = f"the history lacks {missing}: the ranks took them, and their results were lost"
        if missing and all(event.text != text for event in self._history.events):
            self.add_event(step, "note", text)

    def record_extra_rows(self, step: int) -> None:
        """Record the kept rows before `step`, from which all ranks continue."""
        rows = [part[part["step"] < step] for part in self._extra_rows]
        self._extra_rows.clear()
        if any(map(len, rows)):
            self._history.append(np.concatenate(rows))
        for record in self._extra_scalars:
            self._history.add(ScalarRecord(record.rank, _select_steps(record.scalars, 0, step)))
        self._extra_scalars.clear()


def _split_message_time(
    rows: Sequence[np.ndarray],
    advances: Sequence[DispatchResult],
    ranks: Sequence[int],
    ranks_per_pipeline: int,
    clock_offsets: Sequence[float] | None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (wait, transfer) in seconds: for each rank, arrays by step of waiting and transfer times of messages."""
    parts = [np.empty(0, comm_time.MESSAGE_DTYPE) if a.messages is None else np.asarray(a.messages) for a in advances]
    wait_s, transfer_s = [], []
    for own_rows, part, seconds in zip(
        rows, parts, comm_time.compute_message_waits(parts, ranks, ranks_per_pipeline, clock_offsets), strict=True
    ):
        at = part["step"] - (own_rows["step"][0] if len(own_rows) else 0)
        known = (at >= 0) & (at < len(own_rows))  # of the steps that all ranks completed
        wait_s.append(np.bincount(at[known], seconds[known], len(own_rows)))
        transfer_s.append(np.bincount(at[known], (part["end"] - part["begin"] - seconds)[known], len(own_rows)))
    return wait_s, transfer_s


def _slice_steps(advance: DispatchResult, first: int, stop: int) -> DispatchResult:
    """Return the part of a result from step `first` to before `stop`."""
    rows = np.asarray(advance.rows)
    inside = (rows["step"] >= first) & (rows["step"] < stop)
    blocked = None if advance.blocked_spans is None else np.asarray(advance.blocked_spans)[inside]
    scalars, spans = _select_steps(advance.scalars, first, stop), advance.spans
    if spans is not None:
        every = np.asarray(spans)
        spans = every[(every["step"] >= first) & (every["step"] < stop)]
    return dataclasses.replace(advance, rows=rows[inside], blocked_spans=blocked, scalars=scalars, spans=spans)


def _select_steps(scalars: Scalars, first: int, stop: int) -> Scalars:
    selected = {name: [row for row in part if first <= row[0] < stop] for name, part in scalars.items()}
    return {name: part for name, part in selected.items() if part}


def combine_evaluations(step: int, parts: Sequence[EvaluationSums]) -> Evaluation:
    """Add up the sums of all ranks: (samples, {name: (sum, weight)})."""
    names = {name: None for part in parts for name in part[1]}  # a rank without samples has fewer
    values = {}
    for name in names:
        total, weight = (sum(part[1].get(name, (0.0, 0.0))[k] for part in parts) for k in (0, 1))
        values[name] = total / weight if weight else math.nan
    return Evaluation(step, sum(part[0] for part in parts), values)

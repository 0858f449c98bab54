"""Copying a run's history to a tracker, on a background thread.

The run's driver only wakes the thread. Writing takes a limited share of the time, because the driver's thread needs the
same interpreter. So if a tracker is slow, evenly spaced steps are left out. Records after the last write are written
when the run has ended.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import files
from dtkit._util.guard import return_error, run_guarded_in_thread
from dtkit.errors import SupersededError
from dtkit.integrations import timeouts
from dtkit.integrations.trackers.parameters import collect_parameters
from dtkit.integrations.trackers.records import Position, RecordReader
from dtkit.integrations.trackers.tracked import TrackedRun, make_id
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit.integrations.trackers.tracked import Writer
    from dtkit.training.run import Run

_log = logging.getLogger("dtkit")

TIME_SHARE = 0.003
"""Share of the time that writing may take while the run trains."""


@dataclasses.dataclass(frozen=True)
class FeedOptions:
    """Options of :class:`~dtkit.integrations.trackers.base.Tracker` on what to write."""

    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    every: int | None = None
    per_node: bool = True
    report: bool = True


class TimeBudget:
    """Time that may be spent: some at first, then a share of the elapsed time."""

    def __init__(self, now: float) -> None:
        self._credit_s, self._counted_at = timeouts.TRACKER_TIME_CREDIT_S, now

    def get_remaining_s(self, now: float) -> float:
        """Return the time that may be spent now; not positive if none."""
        self._credit_s += TIME_SHARE * (now - self._counted_at)
        self._credit_s, self._counted_at = min(self._credit_s, timeouts.TRACKER_TIME_CREDIT_S), now
        return self._credit_s

    def spend(self, seconds: float) -> None:
        """Note that this much was spent."""
        self._credit_s -= seconds


class RunFeed:
    """Feeds one run to one writer. The run keeps it alive, as one of its subscribers."""

    def __init__(
        self, run: Run, open_writer: Callable[[TrackedRun], Writer], options: FeedOptions, *, key: str, resumed_id: str
    ) -> None:
        """`key` identifies the tracker. `resumed_id` is the run that a checkpoint names, or empty."""
        self._run, self._open_writer, self._options = run, open_writer, options
        log = run.history.run_log
        self._position_file = None if log is None else Path(log.folder) / f"tracker-{key}.json"
        known = self._load_position()
        self.run_id = known.run_id if known else resumed_id or make_id(run.spec.name)
        """Id of the run in the tracker."""
        self._is_resumed = bool(known or resumed_id)
        position = known.position if known else Position.at_end(run.history) if resumed_id else Position()
        self._reader = RecordReader(run.history, position, per_node=options.per_node)
        self._outdated_from = self._reader.next_step if resumed_id and not known else None
        self._budget = TimeBudget(time.monotonic())
        self._step_cost_s = timeouts.TRACKER_STEP_S
        self._writer: Writer | None = None
        self._is_finished = self._is_off = False
        self._opened, self._wake = threading.Event(), threading.Event()
        # locks: while the thread is started or ends
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # -- from other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the writer. Waits for it, up to a limit, so that opening doesn't slow the first steps."""
        self._start_thread()
        self._run.subscribe(self.notify)
        self._opened.wait(timeouts.TRACKER_OPEN_TIMEOUT_S)

    def notify(self) -> None:
        """Let the thread look for records. The run's driver calls this after each change."""
        if not self._is_off and self._is_pending():
            self._start_thread()
            if self._run.done():
                self._wake.set()

    def finish(self, timeout: float) -> None:
        """Wait until all records that have arrived are written, at most `timeout` seconds."""
        self.notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dtkit-tracker", daemon=True)
                self._thread.start()

    def _is_pending(self) -> bool:
        """Return whether there are records to write, or an end."""
        return self._reader.has_new or (self._run.done() and not self._is_finished)

    # -- the thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        error = run_guarded_in_thread(self._write_until_idle, return_error)
        if error is not None:
            self._switch_off(error)
        self._opened.set()

    def _switch_off(self, error: BaseException) -> None:
        """Warn once, and write nothing more."""
        self._is_off, self._thread = True, None
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = f"the tracker {self.run_id} is off, and the training goes on: {reason}"
        _log.warning("%s", text)
        _log.debug("its traceback", exc_info=error)
        self._run.note(text)

    def _write_until_idle(self) -> None:
        """Write until an interval passes without anything new; a later record starts another thread."""
        self._open_if_closed()
        while True:
            self._wake.clear()
            has_ended = self._run.done()  # must be read first: the records of an ended run are complete
            self._write_new(is_last=has_ended)
            if has_ended and not self._is_finished:
                self._finish_writer()
            elif not has_ended:
                self._wake.wait(timeouts.TRACKER_INTERVAL_S)
            with self._lock:
                if not self._is_pending():
                    self._thread = None
                    return

    def _open_if_closed(self) -> None:
        if self._writer is not None:
            return
        tracked = TrackedRun(
            self.run_id,
            self._run.spec.name,
            tuple(self._run.spec.tags),
            is_resumed=self._is_resumed,
            outdated_from=self._outdated_from,
        )
        self._writer, self._is_finished = self._open_writer(tracked), False
        self._writer.write_parameters(collect_parameters(self._run, self._options.params))
        self._is_resumed, self._outdated_from = True, None
        self._save_position()
        self._opened.set()

    def _write_new(self, *, is_last: bool) -> None:
        max_steps = self._choose_max_steps(is_last=is_last)
        if max_steps < 1 or not self._reader.has_new:
            return
        self._open_if_closed()
        assert self._writer is not None
        started_at = time.monotonic()
        points = self._reader.read(max_steps, self._options.every)
        self._writer.write_points(points)
        seconds = time.monotonic() - started_at
        self._budget.spend(seconds)
        self._step_cost_s = seconds / max(1, len(points))
        self._save_position()

    def _choose_max_steps(self, *, is_last: bool) -> int:
        """Return the number of steps that may be written now."""
        num_new = self._reader.num_new_steps
        if self._options.every is not None:
            return max(1, num_new)
        remaining_s = timeouts.TRACKER_LAST_WRITE_S if is_last else self._budget.get_remaining_s(time.monotonic())
        if remaining_s <= 0:
            return 0
        return max(1, int(min(num_new, remaining_s / max(self._step_cost_s, 1e-6))))

    def _finish_writer(self) -> None:
        """Store the report, and close the writer."""
        assert self._writer is not None
        state = self._run.status.state
        if isinstance(self._run.exception, SupersededError):  # another notebook continues the run
            state = State.RUNNING
        elif self._options.report:
            with tempfile.TemporaryDirectory(prefix="dtkit-report-") as folder:
                path = Path(folder) / "report.html"
                self._run.report(path)
                self._writer.write_report(path)
        writer, self._writer, self._is_finished = self._writer, None, True
        writer.close(state)

    # -- for a notebook that takes the run over ---------------------------------------------------------------

    def _load_position(self) -> _KnownRun | None:
        if self._position_file is None or not self._position_file.exists():
            return None
        fields = json.loads(self._position_file.read_text())
        return _KnownRun(fields["id"], Position(fields["totals"], fields["rows"], fields["evaluations"]))

    def _save_position(self) -> None:
        if self._position_file is not None and self._position_file.parent.is_dir():
            position = self._reader.position
            fields = {
                "id": self.run_id,
                "totals": position.totals,
                "rows": position.rows,
                "evaluations": position.evaluations,
            }
            files.replace_file(self._position_file, json.dumps(fields))


@dataclasses.dataclass(frozen=True)
class _KnownRun:
    """A run that another notebook has begun to write."""

    run_id: str
    position: Position

"""The display of a call of the user's function, in a notebook or on a stream.

A view may fail without harm to the call.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from typing import TYPE_CHECKING, Protocol, TextIO

from dtkit._util import timeouts
from dtkit._util.guard import run_guarded
from dtkit._util.notebook import UpdatableDisplay, in_notebook
from dtkit.dashboard.call_charts import CallCharts
from dtkit.dashboard.text.call_text import (
    LogSummary,
    format_html,
    format_line,
    format_text,
    format_values,
    select_logged_values,
)
from dtkit.dashboard.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.dashboard.run_view import CallView

_log = logging.getLogger("dtkit.dashboard")


@contextlib.contextmanager
def display_until_done(call: CallView, stream: TextIO | None = None) -> Iterator[None]:
    """Show logged values and printed lines while the block runs. A silent call shows nothing."""
    view: _View = (
        _NotebookView(call, show_if_empty=bool(call.note)) if in_notebook() else _StreamView(call, stream or sys.stdout)
    )
    throttle = Throttle(view.update, timeouts.LIVE_INTERVAL_S)
    unsubscribe = call.subscribe(throttle.trigger)
    try:
        yield
    finally:
        unsubscribe()
        throttle.close()
        _update_logging_errors(view)


def show(call: CallView) -> None:
    """Show a call as the last line of a cell: live, without blocking."""
    if not in_notebook():
        sys.stdout.write(format_text(call) + "\n")
        return
    view = _NotebookView(call, show_if_empty=True)
    throttle = Throttle(view.update, timeouts.LIVE_INTERVAL_S)
    unsubscribers: list[Callable[[], None]] = []

    def on_change() -> None:
        throttle.trigger()
        if call.state != "running":
            for unsubscribe in unsubscribers:
                unsubscribe()

    view.update()
    unsubscribers.append(call.subscribe(on_change))
    on_change()


def _update_logging_errors(view: _View) -> None:
    """Show the last state on the caller's thread. An error must not hide the outcome of the call."""

    def report(error: Exception) -> None:
        _log.warning("a view failed; the call goes on: %s: %s", type(error).__name__, error, exc_info=error)

    run_guarded(view.update, report)


class _View(Protocol):
    def update(self) -> None: ...


class _NotebookView:
    """Text and HTML in a cell."""

    def __init__(self, call: CallView, *, show_if_empty: bool = False) -> None:
        self._call, self._show_if_empty = call, show_if_empty
        self._display = UpdatableDisplay()
        self._charts = CallCharts(call)
        self._log_summary = LogSummary()
        # locks: while a call's text is made and sent
        self._lock = threading.Lock()  # the last update may overlap with a timer's

    def update(self) -> None:
        with self._lock:
            if self._show_if_empty or self._call.rows or self._call.output or self._call.progress:
                html = format_html(self._call, self._log_summary)
                self._display.show({"text/html": html, "text/plain": format_text(self._call, self._log_summary)})
            if any(count > 1 for count in self._log_summary.row_counts.values()):
                self._charts.update()


class _StreamView:
    """Printed lines as they arrive, and the last new row of each rank."""

    def __init__(self, call: CallView, stream: TextIO) -> None:
        self._call, self._stream = call, stream
        self._num_lines_written = self._num_rows_written = 0
        if call.note:
            stream.write(f"{call.name}: {call.note}\n")
            stream.flush()
        # locks: while a call's text is made and sent
        self._lock = threading.Lock()  # the last update may overlap with a timer's

    def update(self) -> None:
        with self._lock:
            output, rows = self._call.output[self._num_lines_written :], self._call.rows[self._num_rows_written :]
            self._num_lines_written += len(output)  # not the lists' lengths, which may have grown since
            self._num_rows_written += len(rows)
            last_rows = {row["rank"]: row for row in rows}
            lines = [format_line(*line) for line in output]
            lines += [f"[{rank}] {format_values(select_logged_values(row))}" for rank, row in sorted(last_rows.items())]
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()

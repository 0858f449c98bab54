"""What `cluster.run` and `cluster.submit` show: the last values that each rank logged, and what ranks print.

Views read a call through the :class:`CallView` protocol and may fail without harm to it.
"""

from __future__ import annotations

import contextlib
import html
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from dtkit._util import formatting
from dtkit._util.guard import run_guarded
from dtkit.dashboard.display import in_notebook
from dtkit.dashboard.throttle import Throttle
from dtkit.engine.observe.call_output import RESERVED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_log = logging.getLogger("dtkit.dashboard")
UPDATE_INTERVAL_S = 0.25
_MAX_SHOWN_LINES = 30  # printed lines that a notebook shows; all are in `output`
_MAX_AXES_PER_ROW = 3  # axes in a row of the figure
_MIN_LINE_POINTS = 3  # fewer points than this make no line, so they are drawn as dots


class CallView(Protocol):
    """A function running on all ranks, as its views see it. May be read from any thread."""

    @property
    def name(self) -> str:
        """The function's name."""
        ...

    @property
    def state(self) -> str:
        """One of "running", "done" and "failed"."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks."""
        ...

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """What was logged: rank, index and the values."""
        ...

    @property
    def output(self) -> Sequence[tuple[int, str]]:
        """Printed lines, with their rank."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called after every change; returns what ends that."""
        ...


class LogSummary:
    """The rows of a call as a table needs them, each read once: a long loop logs a million, and views look often."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """What was logged, in order of first appearance."""
        self.row_counts: dict[int, int] = {}
        """Rows by rank."""
        self.latest_values: dict[int, dict[str, float]] = {}
        """The latest value of each name, by rank."""
        self._num_rows_read = 0

    def update(self, rows: Sequence[dict[str, Any]]) -> LogSummary:
        """Take in the rows that are new; returns itself."""
        new = rows[self._num_rows_read :]
        self._num_rows_read += len(new)  # not the list's length: it may have grown by now
        for row in new:
            values = _select_logged_values(row)
            self.names.update(dict.fromkeys(values))
            self.row_counts[row["rank"]] = self.row_counts.get(row["rank"], 0) + 1
            self.latest_values.setdefault(row["rank"], {}).update(values)
        return self


def _select_logged_values(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in RESERVED_COLUMNS}


def format_values(values: dict[str, float]) -> str:
    """``loss=0.503 samples=64``."""
    return " ".join(f"{formatting.sanitize_text(name, 60)}={value:.6g}" for name, value in values.items())


def format_text(call: CallView, log_summary: LogSummary | None = None) -> str:
    """The call in a few lines of text."""
    log_summary = (log_summary or LogSummary()).update(call.rows)
    lines = [_format_headline(call)]
    lines += [f"  [{rank}] {format_values(values)}" for rank, values in sorted(log_summary.latest_values.items())]
    lines += [f"[{rank}] {formatting.sanitize_text(line)}" for rank, line in call.output[-_MAX_SHOWN_LINES:]]
    return "\n".join(lines)


def _format_headline(call: CallView) -> str:
    return (
        f"{formatting.sanitize_text(call.name, 60)} on {formatting.format_count(call.world_size, 'rank')}: {call.state}"
    )


def format_html(call: CallView, log_summary: LogSummary | None = None) -> str:
    """The call as HTML: a table of last values, and the last printed lines. Engine text is escaped."""
    log_summary = (log_summary or LogSummary()).update(call.rows)
    parts = [f"<div>{html.escape(_format_headline(call))}</div>"]
    if log_summary.names:
        head = "".join(
            f"<th>{html.escape(formatting.sanitize_text(name, 60))}</th>"
            for name in ("rank", "rows", *log_summary.names)
        )
        body = "".join(_format_html_row(log_summary, rank) for rank in sorted(log_summary.latest_values))
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    count, output = len(call.output), call.output[-_MAX_SHOWN_LINES:]
    if output:
        lines = "\n".join(html.escape(f"[{rank}] {formatting.sanitize_text(line)}") for rank, line in output)
        more = count - _MAX_SHOWN_LINES
        earlier = f"({more:,} earlier lines are in .output)\n" if more > 0 else ""
        parts.append(f"<pre>{earlier}{lines}</pre>")
    return "".join(parts)


def _format_html_row(log_summary: LogSummary, rank: int) -> str:
    values = log_summary.latest_values[rank]
    cells = (
        str(rank),
        f"{log_summary.row_counts[rank]:,}",
        *(formatting.format_loss(values.get(name)) for name in log_summary.names),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def draw_figure(call: CallView) -> Figure:
    """What was logged, an axes per name and a line per rank, by row number."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dtkit.dashboard.figures.style import TEXT_COLOR

    rows = list(call.rows)
    logged = list(LogSummary().update(rows).names)
    across = max(1, min(_MAX_AXES_PER_ROW, len(logged)))
    down = max(1, -(-len(logged) // across))
    drawn = Figure(figsize=(4.6 * across, 3.2 * down), facecolor="white", layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(
        _format_headline(call), x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=TEXT_COLOR, parse_math=False
    )
    if not logged:
        drawn.text(0.5, 0.5, "nothing logged yet", ha="center", va="center", color=TEXT_COLOR)
    for k, name in enumerate(logged):
        _draw_logged_value(drawn.add_subplot(down, across, k + 1), name, rows, call.world_size)
    return drawn


def _draw_logged_value(ax: Axes, name: str, rows: Sequence[dict[str, Any]], num_ranks: int) -> None:
    """One name: a line per rank, with a legend as long as the colours tell ranks apart."""
    from dtkit.dashboard.figures.style import COLORS, GRID_COLOR, MUTED_COLOR, TEXT_COLOR

    points: dict[int, tuple[list[int], list[float]]] = {rank: ([], []) for rank in range(num_ranks)}
    for row in rows:
        if name in row:
            points[row["rank"]][0].append(row["index"])
            points[row["rank"]][1].append(row[name])
    for rank, (at, values) in points.items():
        if values:
            dots = "o" if len(values) < _MIN_LINE_POINTS else ""
            colour = COLORS[rank % len(COLORS)]
            ax.plot(at, values, color=colour, marker=dots, markersize=4, linewidth=1.3, label=f"rank {rank}")
    ax.set_facecolor("white")
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR, parse_math=False)
    ax.set_xlabel("row", fontsize=8, color=MUTED_COLOR)
    ax.grid(visible=True, axis="y", color=GRID_COLOR, linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED_COLOR)
    ax.tick_params(colors=MUTED_COLOR, labelcolor=MUTED_COLOR, labelsize=8)
    if num_ranks <= len(COLORS):
        ax.legend(frameon=False, fontsize=8, labelcolor=TEXT_COLOR)


@contextlib.contextmanager
def display_until_done(call: CallView, stream: TextIO | None = None) -> Iterator[None]:
    """Show what ranks say while the block runs; a call that says nothing shows nothing."""
    view: _View = _NotebookView(call) if in_notebook() else _StreamView(call, stream or sys.stdout)
    throttle = Throttle(view.update, UPDATE_INTERVAL_S)
    unsubscribe = call.subscribe(throttle.trigger)
    try:
        yield
    finally:
        unsubscribe()
        throttle.close()
        _update_logging_errors(view)


def _update_logging_errors(view: _View) -> None:
    """The last state, on the caller's thread: the call's own outcome must not be lost with it."""

    def report(error: Exception) -> None:
        _log.warning("a view failed; the call is not touched: %s: %s", type(error).__name__, error, exc_info=error)

    run_guarded(view.update, report)


def show(call: CallView) -> None:
    """Show a call as the last line of a cell: live, without blocking."""
    if not in_notebook():
        sys.stdout.write(format_text(call) + "\n")
        return
    view = _NotebookView(call, show_if_empty=True)
    throttle = Throttle(view.update, UPDATE_INTERVAL_S)
    unsubscribe: list[Callable[[], None]] = []

    def changed() -> None:
        throttle.trigger()
        if call.state != "running":
            for end in unsubscribe:
                end()

    view.update()
    unsubscribe.append(call.subscribe(changed))
    changed()


class _View(Protocol):
    def update(self) -> None: ...


class _NotebookView:
    """A display handle, made with the first thing there is to show."""

    def __init__(self, call: CallView, *, show_if_empty: bool = False) -> None:
        self._call, self._show_if_empty = call, show_if_empty
        self._handle: Any = None
        self._log_summary = LogSummary()
        # locks: while a call's text is made and sent
        self._lock = threading.Lock()  # the last update may meet one that a timer began

    def update(self) -> None:
        from IPython.display import display

        with self._lock:
            if not (self._show_if_empty or self._call.rows or self._call.output):
                return
            data = {
                "text/html": format_html(self._call, self._log_summary),
                "text/plain": format_text(self._call, self._log_summary),
            }
            if self._handle is None:
                self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._handle.update(data, raw=True)


class _StreamView:
    """Lines as they come, and of each rank's new rows the last."""

    def __init__(self, call: CallView, stream: TextIO) -> None:
        self._call, self._stream = call, stream
        self._num_lines_written = self._num_rows_written = 0
        # locks: while a call's text is made and sent
        self._lock = threading.Lock()  # the last update may meet one that a timer began

    def update(self) -> None:
        with self._lock:
            output, rows = self._call.output[self._num_lines_written :], self._call.rows[self._num_rows_written :]
            self._num_lines_written += len(output)  # not the lists' lengths: they may have grown by now
            self._num_rows_written += len(rows)
            last = {row["rank"]: row for row in rows}
            lines = [f"[{rank}] {formatting.sanitize_text(line)}" for rank, line in output]
            lines += [f"[{rank}] {format_values(_select_logged_values(row))}" for rank, row in sorted(last.items())]
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()

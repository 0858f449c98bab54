"""A call of the user's function, as text and as HTML: the last logged values of each rank, and printed lines."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.types import RESERVED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.dashboard.run_view import CallView

_MAX_INDENTATION = 100
_MAX_SHOWN_LINES = 30  # earlier lines are in `output` only


class LogSummary:
    """Summary of logged rows for a table. Each row is read once, since a loop may log a million rows, and views update
    often.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """Names of the logged values, in order of first appearance."""
        self.row_counts: dict[int, int] = {}
        """Number of rows by rank."""
        self.latest_values: dict[int, dict[str, float]] = {}
        """The latest value of each name, by rank."""
        self._num_rows_read = 0

    def update(self, rows: Sequence[dict[str, Any]]) -> LogSummary:
        """Read the new rows; return itself."""
        new_rows = rows[self._num_rows_read :]
        self._num_rows_read += len(new_rows)  # not the list's length, which may have grown since
        for row in new_rows:
            values = select_logged_values(row)
            self.names.update(dict.fromkeys(values))
            self.row_counts[row["rank"]] = self.row_counts.get(row["rank"], 0) + 1
            self.latest_values.setdefault(row["rank"], {}).update(values)
        return self


def select_logged_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row that the user logged."""
    return {name: value for name, value in row.items() if name not in RESERVED_COLUMNS}


def format_values(values: Mapping[str, float]) -> str:
    """Return values such as ``loss=0.503 samples=64``."""
    return " ".join(f"{formatting.sanitize_text(name, 60)}={value:.6g}" for name, value in values.items())


def format_line(rank: int, line: str) -> str:
    """Return a printed line with its rank. It keeps its indentation, as tables and tracebacks need it."""
    line = line.expandtabs()
    indentation = min(len(line) - len(line.lstrip(" ")), _MAX_INDENTATION)
    return f"[{rank}] {' ' * indentation}{formatting.sanitize_text(line.lstrip(' '))}"


def format_headline(call: CallView) -> str:
    """Return a headline such as ``measure on 4 ranks: running``."""
    ranks = formatting.format_count(call.world_size, "node")
    is_starting = call.state == "running" and call.note and not (call.rows or call.output or call.progress)
    note = f", {call.note}" if is_starting else ""
    return f"{formatting.sanitize_text(call.name, 60)} on {ranks}: {call.state}{note}"


def format_text(call: CallView, log_summary: LogSummary | None = None) -> str:
    """Return the call in a few lines of text."""
    log_summary = (log_summary or LogSummary()).update(call.rows)
    lines = [format_headline(call)]
    lines += [f"  [{rank}] {format_values(values)}" for rank, values in sorted(log_summary.latest_values.items())]
    lines += [format_line(*line) for line in [*call.output[-_MAX_SHOWN_LINES:], *_list_progress(call)]]
    return "\n".join(lines)


def format_html(call: CallView, log_summary: LogSummary | None = None) -> str:
    """Return the call as HTML: a table of the latest values, and the last printed lines."""
    log_summary = (log_summary or LogSummary()).update(call.rows)
    table = _make_table(log_summary).to_html() if log_summary.names else ""
    return f"<div>{html.escape(format_headline(call))}</div>{table}{_format_output(call.output, _list_progress(call))}"


def _make_table(log_summary: LogSummary) -> Table:
    header = ["node", "rows", *(formatting.sanitize_text(name, 60) for name in log_summary.names)]
    rows = [
        [
            str(rank),
            f"{log_summary.row_counts[rank]:,}",
            *(formatting.format_loss(values.get(name)) for name in log_summary.names),
        ]
        for rank, values in sorted(log_summary.latest_values.items())
    ]
    return Table(header, rows)


def _list_progress(call: CallView) -> list[tuple[int, str]]:
    """Return the lines without an end of a running call."""
    shown = sorted(dict(call.progress).items()) if call.state == "running" else []
    return [(rank, line) for rank, line in shown if line.strip()]


def _format_output(output: Sequence[tuple[int, str]], progress: Sequence[tuple[int, str]]) -> str:
    if not output and not progress:
        return ""
    num_earlier = len(output) - _MAX_SHOWN_LINES
    earlier = f"({num_earlier:,} earlier lines are in .output)\n" if num_earlier > 0 else ""
    lines = "\n".join(html.escape(format_line(*line)) for line in [*output[-_MAX_SHOWN_LINES:], *progress])
    return f"<pre>{earlier}{lines}</pre>"

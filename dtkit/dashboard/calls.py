"""What `cluster.run` and `cluster.submit` show: the last values that each rank logged, and what ranks print.

Views read a call through the :class:`Call` protocol and may fail without harm to it.
"""

from __future__ import annotations

import contextlib
import html
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from dtkit._util import formatting
from dtkit._util.guard import attempt
from dtkit.dashboard.display import in_notebook
from dtkit.dashboard.throttle import Throttle
from dtkit.engine.observe.call_output import RESERVED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_log = logging.getLogger("dtkit.dashboard")
EVERY_S = 0.25
_LINES = 30  # printed lines that a notebook shows; all are in `output`
_ACROSS = 3  # axes in a row of the figure
_FEW = 3  # fewer points than this make no line, so they are drawn as dots


class Call(Protocol):
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


class Digest:
    """The rows of a call as a table needs them, each read once: a long loop logs a million, and views look often."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """What was logged, in order of first appearance."""
        self.counts: dict[int, int] = {}
        """Rows by rank."""
        self.values: dict[int, dict[str, float]] = {}
        """The latest value of each name, by rank."""
        self._read = 0

    def read(self, rows: Sequence[dict[str, Any]]) -> Digest:
        """Take in the rows that are new; returns itself."""
        new = rows[self._read :]
        self._read += len(new)  # not the list's length: it may have grown by now
        for row in new:
            values = _values(row)
            self.names.update(dict.fromkeys(values))
            self.counts[row["rank"]] = self.counts.get(row["rank"], 0) + 1
            self.values.setdefault(row["rank"], {}).update(values)
        return self


def _values(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in RESERVED_COLUMNS}


def values_text(values: dict[str, float]) -> str:
    """``loss=0.503 samples=64``."""
    return " ".join(f"{formatting.plain(name, 60)}={value:.6g}" for name, value in values.items())


def summary(call: Call, digest: Digest | None = None) -> str:
    """The call in a few lines of text."""
    digest = (digest or Digest()).read(call.rows)
    lines = [_head(call)]
    lines += [f"  [{rank}] {values_text(values)}" for rank, values in sorted(digest.values.items())]
    lines += [f"[{rank}] {formatting.plain(line)}" for rank, line in call.output[-_LINES:]]
    return "\n".join(lines)


def _head(call: Call) -> str:
    return f"{formatting.plain(call.name, 60)} on {formatting.plural(call.world_size, 'rank')}: {call.state}"


def page(call: Call, digest: Digest | None = None) -> str:
    """The call as HTML: a table of last values, and the last printed lines. Engine text is escaped."""
    digest = (digest or Digest()).read(call.rows)
    parts = [f"<div>{html.escape(_head(call))}</div>"]
    if digest.names:
        head = "".join(
            f"<th>{html.escape(formatting.plain(name, 60))}</th>" for name in ("rank", "rows", *digest.names)
        )
        body = "".join(_table_row(digest, rank) for rank in sorted(digest.values))
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    count, output = len(call.output), call.output[-_LINES:]
    if output:
        lines = "\n".join(html.escape(f"[{rank}] {formatting.plain(line)}") for rank, line in output)
        more = count - _LINES
        earlier = f"({more:,} earlier lines are in .output)\n" if more > 0 else ""
        parts.append(f"<pre>{earlier}{lines}</pre>")
    return "".join(parts)


def _table_row(digest: Digest, rank: int) -> str:
    values = digest.values[rank]
    cells = (str(rank), f"{digest.counts[rank]:,}", *(formatting.loss(values.get(name)) for name in digest.names))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def figure(call: Call) -> Figure:
    """What was logged, an axes per name and a line per rank, by row number."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dtkit.dashboard.axes import INK

    rows = list(call.rows)
    logged = list(Digest().read(rows).names)
    across = max(1, min(_ACROSS, len(logged)))
    down = max(1, -(-len(logged) // across))
    drawn = Figure(figsize=(4.6 * across, 3.2 * down), facecolor="white", layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(_head(call), x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=INK, parse_math=False)
    if not logged:
        drawn.text(0.5, 0.5, "nothing logged yet", ha="center", va="center", color=INK)
    for k, name in enumerate(logged):
        _draw(drawn.add_subplot(down, across, k + 1), name, rows, call.world_size)
    return drawn


def _draw(ax: Axes, name: str, rows: Sequence[dict[str, Any]], ranks: int) -> None:
    """One name: a line per rank, with a legend as long as the colours tell ranks apart."""
    from dtkit.dashboard.axes import COLOURS, GRID, INK, MUTED

    points: dict[int, tuple[list[int], list[float]]] = {rank: ([], []) for rank in range(ranks)}
    for row in rows:
        if name in row:
            points[row["rank"]][0].append(row["index"])
            points[row["rank"]][1].append(row[name])
    for rank, (at, values) in points.items():
        if values:
            dots = "o" if len(values) < _FEW else ""
            colour = COLOURS[rank % len(COLOURS)]
            ax.plot(at, values, color=colour, marker=dots, markersize=4, linewidth=1.3, label=f"rank {rank}")
    ax.set_facecolor("white")
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False)
    ax.set_xlabel("row", fontsize=8, color=MUTED)
    ax.grid(visible=True, axis="y", color=GRID, linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED)
    ax.tick_params(colors=MUTED, labelcolor=MUTED, labelsize=8)
    if ranks <= len(COLOURS):
        ax.legend(frameon=False, fontsize=8, labelcolor=INK)


@contextlib.contextmanager
def following(call: Call, stream: TextIO | None = None) -> Iterator[None]:
    """Show what ranks say while the block runs; a call that says nothing shows nothing."""
    view: _View = _InNotebook(call) if in_notebook() else _OnStream(call, stream or sys.stdout)
    throttle = Throttle(view.update, EVERY_S)
    unsubscribe = call.subscribe(throttle.poke)
    try:
        yield
    finally:
        unsubscribe()
        throttle.close()
        _update_last(view)


def _update_last(view: _View) -> None:
    """The last state, on the caller's thread: the call's own outcome must not be lost with it."""

    def report(error: Exception) -> None:
        _log.warning("a view failed; the call is not touched: %s: %s", type(error).__name__, error, exc_info=error)

    attempt(view.update, report)


def show(call: Call) -> None:
    """Show a call as the last line of a cell: live, without blocking."""
    if not in_notebook():
        sys.stdout.write(summary(call) + "\n")
        return
    view = _InNotebook(call, always=True)
    throttle = Throttle(view.update, EVERY_S)
    unsubscribe: list[Callable[[], None]] = []

    def changed() -> None:
        throttle.poke()
        if call.state != "running":
            for end in unsubscribe:
                end()

    view.update()
    unsubscribe.append(call.subscribe(changed))
    changed()


class _View(Protocol):
    def update(self) -> None: ...


class _InNotebook:
    """A display handle, made with the first thing there is to show."""

    def __init__(self, call: Call, *, always: bool = False) -> None:
        self._call, self._always = call, always
        self._handle: Any = None
        self._digest = Digest()
        # locks: while a call's text is made and sent
        self._lock = threading.Lock()  # the last update may meet one that a timer began

    def update(self) -> None:
        from IPython.display import display

        with self._lock:
            if not (self._always or self._call.rows or self._call.output):
                return
            data = {"text/html": page(self._call, self._digest), "text/plain": summary(self._call, self._digest)}
            if self._handle is None:
                self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._handle.update(data, raw=True)


class _OnStream:
    """Lines as they come, and of each rank's new rows the last."""

    def __init__(self, call: Call, stream: TextIO) -> None:
        self._call, self._stream = call, stream
        self._lines = self._rows = 0
        # locks: while a call's text is made and sent
        self._lock = threading.Lock()  # the last update may meet one that a timer began

    def update(self) -> None:
        with self._lock:
            output, rows = self._call.output[self._lines :], self._call.rows[self._rows :]
            self._lines += len(output)  # not the lists' lengths: they may have grown by now
            self._rows += len(rows)
            last = {row["rank"]: row for row in rows}
            lines = [f"[{rank}] {formatting.plain(line)}" for rank, line in output]
            lines += [f"[{rank}] {values_text(_values(row))}" for rank, row in sorted(last.items())]
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()

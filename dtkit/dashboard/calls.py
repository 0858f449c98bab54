"""What `cluster.run` and `cluster.submit` show: the last values that each rank logged, and what ranks print.

Views read a call through the :class:`Call` protocol and may fail without harm to it.
"""

from __future__ import annotations

import contextlib
import html
import sys
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from dtkit import units
from dtkit.dashboard.display import in_notebook
from dtkit.dashboard.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

EVERY_S = 0.25
_LINES = 30  # printed lines that a notebook shows; all are in `output`


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


def names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What was logged, in order of first appearance."""
    return [name for name in dict.fromkeys(key for row in rows for key in row) if name not in ("rank", "index")]


def last_rows(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The latest row of each rank, by rank."""
    last = {row["rank"]: row for row in rows}
    return dict(sorted(last.items()))


def row_text(row: dict[str, Any]) -> str:
    """``loss=0.503 samples=64``."""
    return " ".join(f"{name}={value:.6g}" for name, value in row.items() if name not in ("rank", "index"))


def summary(call: Call) -> str:
    """The call in a few lines of text."""
    lines = [f"{call.name} on {units.plural(call.world_size, 'rank')}: {call.state}"]
    lines += [f"  [{rank}] {row_text(row)}" for rank, row in last_rows(call.rows).items()]
    lines += [f"[{rank}] {units.plain(line)}" for rank, line in list(call.output)[-_LINES:]]
    return "\n".join(lines)


def page(call: Call) -> str:
    """The call as HTML: a table of last values, and the last printed lines. Engine text is escaped."""
    parts = [
        f"<div>{html.escape(call.name)} on {units.plural(call.world_size, 'rank')}: {html.escape(call.state)}</div>"
    ]
    logged = names(call.rows)
    if logged:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ("rank", "rows", *logged))
        counts = {rank: sum(row["rank"] == rank for row in call.rows) for rank in range(call.world_size)}
        body = "".join(
            f"<tr><td>{rank}</td><td>{counts[rank]}</td>"
            + "".join(f"<td>{units.loss(row.get(name))}</td>" for name in logged)
            + "</tr>"
            for rank, row in last_rows(call.rows).items()
        )
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if call.output:
        lines = "\n".join(html.escape(f"[{rank}] {units.plain(line)}") for rank, line in list(call.output)[-_LINES:])
        more = len(call.output) - _LINES
        earlier = f"({more} earlier lines are in .output)\n" if more > 0 else ""
        parts.append(f"<pre>{earlier}{lines}</pre>")
    return "".join(parts)


def figure(call: Call) -> Figure:
    """What was logged, an axes per name and a line per rank, by row number."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dtkit.dashboard.figures import COLOURS

    logged = names(call.rows)
    drawn = Figure(figsize=(4.6 * max(1, len(logged)), 3.2), facecolor="white", layout="constrained")
    FigureCanvasAgg(drawn)
    for ax, name in zip(drawn.subplots(1, max(1, len(logged)), squeeze=False)[0], logged, strict=False):
        for rank in range(call.world_size):
            points = [(row["index"], row[name]) for row in call.rows if row["rank"] == rank and name in row]
            if points:
                ax.plot(*zip(*points, strict=True), color=COLOURS[rank % len(COLOURS)], label=f"rank {rank}")
        ax.set(title=name, xlabel="row")
        ax.legend(frameon=False, fontsize=8)
    drawn.suptitle(summary(call).partition("\n")[0], fontsize=10)
    return drawn


@contextlib.contextmanager
def following(call: Call, stream: TextIO | None = None) -> Iterator[None]:
    """Show what ranks say while the block runs; a call that says nothing shows nothing."""
    view = _InNotebook(call) if in_notebook() else _OnStream(call, stream or sys.stdout)
    throttle = Throttle(view.update, EVERY_S)
    unsubscribe = call.subscribe(throttle.poke)
    try:
        yield
    finally:
        unsubscribe()
        throttle.close()
        view.update()


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


class _InNotebook:
    """A display handle, made with the first thing there is to show."""

    def __init__(self, call: Call, *, always: bool = False) -> None:
        self._call, self._always = call, always
        self._handle: Any = None

    def update(self) -> None:
        from IPython.display import display

        if not (self._always or self._call.rows or self._call.output):
            return
        data = {"text/html": page(self._call), "text/plain": summary(self._call)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)


class _OnStream:
    """Lines as they come, and of each rank's new rows the last."""

    def __init__(self, call: Call, stream: TextIO) -> None:
        self._call, self._stream = call, stream
        self._lines = self._rows = 0

    def update(self) -> None:
        output, rows = self._call.output, self._call.rows
        lines = [f"[{rank}] {units.plain(line)}" for rank, line in output[self._lines :]]
        lines += [f"[{rank}] {row_text(row)}" for rank, row in last_rows(rows[self._rows :]).items()]
        self._lines, self._rows = len(output), len(rows)
        if lines:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()

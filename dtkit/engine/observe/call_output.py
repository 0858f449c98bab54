"""What an engine says while a call runs: rows from `dtkit.log`, and what it prints.

Everything is numbered and kept until the call returns it. Meanwhile it is published at most four times a second,
from a thread, so that what was said before a long computation shows during it. Published messages may be lost;
the numbers let the notebook fill the gaps from the call's return.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Item = tuple[str, Any]

PERIOD_S = 0.25
LINES_PER_S = 100  # printed lines; more are counted, not carried
OWN_COLUMNS = ("rank", "index")  # of every row, given by the notebook


class Channel:
    """The items of one call: ("row", {name: number}) and ("text", line)."""

    def __init__(self, publish: Callable[[int, list[Item]], None] | None = None) -> None:
        """`publish(first, items)` sends items numbered from `first`; None keeps them for the return only."""
        self.items: list[Item] = []
        self._publish = publish
        self._sent = 0
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._allowance, self._since, self._dropped = float(LINES_PER_S), time.monotonic(), 0

    def row(self, values: dict[str, float]) -> None:
        """Add a row."""
        self.items.append(("row", values))
        self._wake.set()

    def line(self, text: str) -> None:
        """Add a printed line, unless there have been too many."""
        now = time.monotonic()
        self._allowance = min(LINES_PER_S, self._allowance + (now - self._since) * LINES_PER_S)
        self._since = now
        if self._allowance < 1:
            self._dropped += 1
            return
        self._allowance -= 1
        self._report_dropped()
        self.items.append(("text", text))
        self._wake.set()

    def _report_dropped(self) -> None:
        if self._dropped:
            self.items.append(("text", f"[{self._dropped} lines dropped: over {LINES_PER_S} a second]"))
            self._dropped = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Take over stdout and stderr, and publish, until the call has ended."""
        out, err = _Lines(self), _Lines(self)
        thread = threading.Thread(target=self._run, name="dtkit-publish", daemon=True)
        if self._publish is not None:
            thread.start()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
        finally:
            out.finish()
            err.finish()
            self._report_dropped()
            self._closed.set()
            self._wake.set()
            if self._publish is not None:
                thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(timeout=3600)
            self._wake.clear()
            items = self.items[self._sent :]
            if items and self._publish is not None and not self._closed.is_set():
                self._publish(self._sent, [_for_json(item) for item in items])
                self._sent += len(items)
                self._closed.wait(PERIOD_S)


def _for_json(item: Item) -> Item:
    """An item as JSON can carry it: NaN and infinity as text, which the notebook takes for numbers again."""
    kind, what = item
    if kind != "row":
        return item
    return kind, {name: value if math.isfinite(value) else str(value) for name, value in what.items()}


class _Lines(io.TextIOBase):
    """A text stream that hands whole lines to a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._rest = channel, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._channel.line(line)
        return len(text)

    def finish(self) -> None:
        """The last line may lack its end."""
        if self._rest:
            self._channel.line(self._rest)
            self._rest = ""


_current: Channel | None = None


@contextlib.contextmanager
def current(channel: Channel) -> Iterator[None]:
    """Make `channel` the one that :func:`log` writes to."""
    global _current  # noqa: PLW0603 - an engine runs one call at a time
    previous, _current = _current, channel
    try:
        with channel.open():
            yield
    finally:
        _current = previous


def log(**values: float) -> None:
    """Report numbers from inside ``cluster.run``: they arrive in the notebook, live, as a row of this rank.

    Example: ``dtkit.log(loss=loss.item(), samples=len(batch))``. Tensors of one element count as numbers.
    """
    row = {}
    for name, value in values.items():
        if name in OWN_COLUMNS:
            raise ValueError(
                f"dtkit.log({name}=...): {' and '.join(OWN_COLUMNS)} are columns that dtkit fills in; use another name"
            )
        try:
            row[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"dtkit.log({name}={type(value).__name__}): values must be numbers or tensors of one element; "
                "use .item() or .mean()"
            ) from None
    if _current is None:  # a loop that is tried in the notebook first should work there too
        print(" ".join(f"{k}={v:.6g}" for k, v in row.items()), file=sys.stdout)  # noqa: T201
        return
    _current.row(row)

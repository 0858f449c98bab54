"""A line with the elapsed time of work that takes over a second, such as starting engines or sending data.

Shorter work shows nothing. In a notebook the line is a display of its own, which shows the elapsed time at the end. A
terminal rewrites the line in place and then clears it. Elsewhere a line with the time is printed at the end, and before
that, one that names work of more than a few seconds.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

from dtkit._util import formatting, timeouts
from dtkit._util.notebook import UpdatableDisplay, in_notebook

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("dtkit.dashboard")


class _ProgressLine(Protocol):
    def show(self, text: str) -> None: ...

    def finish(self, text: str) -> None: ...


class Progress:
    """Work in progress; `update` changes its text."""

    def __init__(self, text: str) -> None:
        self._name = self._text = text
        self._started_at = time.monotonic()
        self._done_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dtkit-progress", daemon=True)
        self._line: _ProgressLine | None = None

    def update(self, text: str) -> None:
        """Show the current activity."""
        self._text = text

    def start(self) -> None:
        """Show the line once the work has taken a second."""
        self._thread.start()

    def finish(self) -> None:
        """End the line."""
        self._done_event.set()
        self._thread.join(timeout=timeouts.PROGRESS_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._refresh_until_done()
        except (OSError, ValueError) as error:  # the stream is closed, or nobody reads it
            _log.warning("the progress line failed; the work goes on: %s: %s", type(error).__name__, error)

    def _refresh_until_done(self) -> None:
        wait_s = timeouts.PROGRESS_DELAY_S
        while not self._done_event.wait(wait_s):
            wait_s = timeouts.PROGRESS_INTERVAL_S
            if self._line is None:
                self._line = _make_progress_line()
            self._line.show(f"{self._text} … {formatting.format_clock(self._get_elapsed_s())}")
        if self._line is not None:
            self._line.finish(f"{self._name}: {formatting.format_elapsed(self._get_elapsed_s())}")

    def _get_elapsed_s(self) -> float:
        return time.monotonic() - self._started_at


@contextlib.contextmanager
def show_progress(text: str) -> Iterator[Progress]:
    """Show `text` and the elapsed time while the block runs, if it runs for over a second."""
    progress = Progress(text)
    progress.start()
    try:
        yield progress
    finally:
        progress.finish()


def _make_progress_line() -> _ProgressLine:
    if in_notebook():
        return _NotebookLine()
    return _TerminalLine() if sys.stderr.isatty() else _PlainLine()


class _NotebookLine:
    """A display in the cell that runs when it is first shown."""

    def __init__(self) -> None:
        self._display = UpdatableDisplay()

    def show(self, text: str) -> None:
        self._display.show({"text/plain": text})

    def finish(self, text: str) -> None:
        # A display can't be removed, and an empty one would leave a gap, so it shows the elapsed time.
        self._display.show({"text/plain": text})


class _TerminalLine:
    """A line of rich's, which each :meth:`show` replaces, and which vanishes at the end."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr, force_terminal=True, highlight=False)
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def show(self, text: str) -> None:
        from rich.text import Text

        self._live.update(Text(text, no_wrap=True, overflow="ellipsis", style="cyan"), refresh=True)

    def finish(self, text: str) -> None:  # noqa: ARG002 - the line is cleared
        self._live.stop()


class _PlainLine:
    def __init__(self) -> None:
        self._shown_at = time.monotonic()
        self._is_named = False

    def show(self, text: str) -> None:
        if not self._is_named and time.monotonic() - self._shown_at >= timeouts.LOG_INTERVAL_S:
            self._is_named = True
            self._write(text)

    def finish(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

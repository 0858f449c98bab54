"""A line with the elapsed time for what takes over a second: starting engines, sending data.

Work that is done sooner shows nothing. In a notebook the line is a display of its own, which says at the end how
long it took; on a terminal it is rewritten in place and then goes; anywhere else it is printed once.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from dtkit._util import formatting
from dtkit.dashboard.display import in_notebook

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("dtkit.dashboard")
SHOW_AFTER_S, REFRESH_INTERVAL_S = 1.0, 0.5


class _ProgressLine(Protocol):
    def show(self, text: str) -> None: ...

    def finish(self, text: str) -> None: ...


class Progress:
    """What is being waited for; `update` changes the words."""

    def __init__(self, text: str) -> None:
        self._name = self._text = text
        self._started_at = time.monotonic()
        self._done_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dtkit-progress", daemon=True)
        self._line: _ProgressLine | None = None

    def update(self, text: str) -> None:
        """Say what is being done now."""
        self._text = text

    def _run(self) -> None:
        try:
            self._refresh_until_done()
        except (OSError, ValueError) as error:  # the stream is closed, or nobody reads it any more
            _log.warning("the progress line failed; the work goes on: %s: %s", type(error).__name__, error)

    def _refresh_until_done(self) -> None:
        wait = SHOW_AFTER_S
        while not self._done_event.wait(wait):
            wait = REFRESH_INTERVAL_S
            if self._line is None:
                self._line = _make_progress_line()
            self._line.show(f"{self._text} … {formatting.format_clock(time.monotonic() - self._started_at)}")
        if self._line is not None:
            self._line.finish(f"{self._name}: {formatting.format_clock(time.monotonic() - self._started_at)}")


@contextlib.contextmanager
def show_progress(text: str) -> Iterator[Progress]:
    """Show `text` and the elapsed time while the block runs, if it runs for over a second."""
    progress = Progress(text)
    progress._thread.start()  # noqa: SLF001 - this module's own
    try:
        yield progress
    finally:
        progress._done_event.set()  # noqa: SLF001
        progress._thread.join(timeout=5)  # noqa: SLF001


def _make_progress_line() -> _ProgressLine:
    if in_notebook():
        return _NotebookLine()
    return _TerminalLine() if sys.stderr.isatty() else _PlainLine()


class _NotebookLine:
    """A display handle: it belongs to the cell that it is made in, and can be updated from any thread."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)

    def finish(self, text: str) -> None:
        # A display can't be taken back, and an empty one would leave a gap: it becomes what it took.
        self._handle.update({"text/plain": text}, raw=True)


class _TerminalLine:
    def show(self, text: str) -> None:
        text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line can't be gone back over
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()

    def finish(self, text: str) -> None:  # noqa: ARG002 - the line goes, as if it had not been
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


class _PlainLine:
    _is_shown = False

    def show(self, text: str) -> None:
        if not self._is_shown:
            self._is_shown = True
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def finish(self, text: str) -> None:
        pass

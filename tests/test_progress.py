"""Progress line of work that takes over a second: timing, output streams, and removal from a terminal."""

from __future__ import annotations

import io
import re
import sys
import threading
import types
from typing import Any

import pytest

from dtkit._util import timeouts
from dtkit._util.notebook import in_notebook
from dtkit.dashboard.text import progress


class Screen(io.StringIO):
    """A stream that signals each write."""

    def __init__(self, *, tty: bool = False) -> None:
        super().__init__()
        self.tty, self.written = tty, threading.Semaphore(0)

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.release()
        return count

    def await_writes(self, count: int) -> None:
        for _ in range(count):
            assert self.written.acquire(timeout=10)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "PROGRESS_DELAY_S", 0.01)
    monkeypatch.setattr(timeouts, "PROGRESS_INTERVAL_S", 0.01)


def on(monkeypatch: pytest.MonkeyPatch, screen: Any) -> Any:
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def read_screen(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end: of the sequences that rich writes here."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[^A-Za-z]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] = part
    return lines[: 1 + max((k for k, line in enumerate(lines) if line), default=0)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "dtkit-progress"]


@pytest.mark.parametrize("tty", [True, False])
def test_short_work_shows_no_progress(monkeypatch: pytest.MonkeyPatch, tty):
    screen = on(monkeypatch, Screen(tty=tty))
    with progress.show_progress("starting 2 engines"):
        assert threads()
    assert screen.getvalue() == ""
    assert not threads()


def test_a_terminal_line_is_rewritten_and_then_cleared(quick, monkeypatch: pytest.MonkeyPatch):
    screen = on(monkeypatch, Screen(tty=True))
    with progress.show_progress("starting 2 engines") as line:
        screen.await_writes(2)
        line.update("loading torch")
        screen.await_writes(2)
    shown = screen.getvalue()
    assert read_screen(shown) == [""]
    before, _, after = shown.partition("\x1b[2K")
    assert "starting 2 engines … 0 s" in before
    assert "loading torch … 0 s" in after
    assert shown.count("\n") == 1


def test_a_terminal_line_never_wraps(quick, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "20")
    screen = on(monkeypatch, Screen(tty=True))
    with progress.show_progress("x" * 100):
        screen.await_writes(1)
    assert set(re.findall(r"x+…?", screen.getvalue())) == {"x" * 19 + "…"}


@pytest.mark.parametrize(
    ("interval", "expected"), [(1e9, r"sending: \S+ s\n"), (0.0, r"sending … 0 s\nsending: \S+ s\n")]
)
def test_a_plain_stream_gets_the_time_at_the_end(
    quick, monkeypatch: pytest.MonkeyPatch, interval: float, expected: str
):
    screen = on(monkeypatch, Screen())
    monkeypatch.setattr(progress.timeouts, "LOG_INTERVAL_S", interval)
    shown = threading.Semaphore(0)
    show = progress._PlainLine.show

    def counted(line: Any, text: str) -> None:
        show(line, text)
        shown.release()

    monkeypatch.setattr(progress._PlainLine, "show", counted)
    with progress.show_progress("sending"):
        assert all(shown.acquire(timeout=10) for _ in range(3))
    assert re.fullmatch(expected, screen.getvalue())


def test_the_time_at_the_end_has_tenths(quick, monkeypatch: pytest.MonkeyPatch):
    screen = on(monkeypatch, Screen())
    work = progress.Progress("sending")
    work._started_at -= 3.9
    shown, show = threading.Event(), progress._PlainLine.show

    def signal(line: Any, text: str) -> None:
        show(line, text)
        shown.set()

    monkeypatch.setattr(progress._PlainLine, "show", signal)
    work.start()
    assert shown.wait(timeout=10)
    work.finish()
    assert re.fullmatch(r"sending: \d\.\d s\n", screen.getvalue())


def test_the_progress_line_ends_after_an_error(quick, monkeypatch: pytest.MonkeyPatch):
    screen = on(monkeypatch, Screen(tty=True))

    def fail() -> None:
        with progress.show_progress("sending"):
            screen.await_writes(1)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert read_screen(screen.getvalue()) == [""]
    assert not threads()


def test_a_failing_progress_line_does_not_affect_the_work(
    quick, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Closed(Screen):
        def write(self, text: str) -> int:
            self.written.release()
            raise BrokenPipeError("gone")

    screen = on(monkeypatch, Closed())
    monkeypatch.setattr(progress.timeouts, "LOG_INTERVAL_S", 0.0)
    with progress.show_progress("sending"):
        screen.await_writes(1)
    assert not threads()
    assert "the progress line failed; the work goes on: BrokenPipeError: gone" in caplog.text


def test_a_notebook_display_shows_the_elapsed_time_at_the_end(quick, monkeypatch: pytest.MonkeyPatch):
    shown, updated = [], threading.Semaphore(0)

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data["text/plain"])
            updated.release()

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(("display", data["text/plain"]))
        return Handle()

    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    with progress.show_progress("starting"):
        assert updated.acquire(timeout=10)
    assert shown[0] == ("display", "starting … 0 s")
    assert shown[1] == "starting … 0 s"
    assert re.fullmatch(r"starting: \S+ s", shown[-1])
    assert sum(isinstance(entry, tuple) for entry in shown) == 1


def test_a_half_imported_ipython_has_no_shell(monkeypatch):
    """The thread of the progress looked for one while another thread imported IPython, and failed."""
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    assert not in_notebook()

"""One line about a run that failed although nobody looked at it.

A view of the run shows its error, and a wait raises it. Without either, a training in the background would fail
silently. The line is printed to stderr: in a notebook below the cell that runs, or else below the next one. In a script
it comes with the next training, or when the cluster is closed.
"""

from __future__ import annotations

import atexit
import sys
import threading
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.notebook import get_shell
from dtkit.errors import EngineError, format_ranks
from dtkit.types import State

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView
    from dtkit.training.progress import RunProgress

_MAX_ERROR_CHARS = 200

# locks: for a few assignments
_lock = threading.Lock()
_pending: list[FailureNotice] = []
_registered_with: list[object] = []
"""The shell whose cells are followed by `print_pending`, or None for a script."""


class FailureNotice:
    """The notice of one run."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._seen: BaseException | None = None

    def update(self, progress: RunProgress) -> None:
        """Print a new error of the run at the next occasion, unless the user has seen it by then."""
        error = progress.exception
        if error is None or progress.state not in (State.FAILED, State.PAUSED):
            return
        with _lock:
            if error is self._seen or error is self._error:
                return
            self._error = error
            _pending.append(self)
        _register()

    def mark_seen(self, error: BaseException | None) -> None:
        """Print nothing about this error: the user sees it elsewhere."""
        with _lock:
            if error is not None:
                self._seen = error

    def read(self, error: BaseException | None) -> BaseException | None:
        """Return the error. The main thread reads it for the user, or for a view that the user asked for."""
        if threading.current_thread() is threading.main_thread():
            self.mark_seen(error)
        return error

    def format(self) -> str | None:
        """Return the line, once for each error; None if the user has seen the error."""
        from dtkit.dashboard import display

        with _lock:
            error, is_seen = self._error, self._error is self._seen
            self._seen = error
        if error is None or is_seen or display.is_shown(self._run) or self._run.exception is not error:
            return None
        return _format_line(self._run, error)


def print_pending(*_: object) -> None:
    """Print the notices of all runs that have failed since the last call."""
    with _lock:
        pending, _pending[:] = list(_pending), []
    for line in filter(None, (notice.format() for notice in pending)):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _register() -> None:
    """Have notices printed after each cell, or at the end of a script."""
    shell = get_shell()
    with _lock:
        if any(each is shell for each in _registered_with):
            return
        _registered_with.append(shell)
    if shell is None:
        atexit.register(print_pending)
    else:
        shell.events.register("post_run_cell", print_pending)


def _format_line(run: RunView, error: BaseException) -> str:
    status, name = run.status, formatting.sanitize_text(run.spec.name, 60)
    verb = "failed" if status.state.has_ended else "paused"
    rank, text = "", f"{type(error).__name__}: {_find_first_line(str(error))}"
    if isinstance(error, EngineError):
        cause = error.cause
        ranks = sorted(f.rank for f in error.failures if not f.victim and f.message == cause.message)
        rank = f" on {format_ranks(ranks or [cause.rank])}"
        text = f"{cause.type}: {_find_first_line(cause.message)}"
    return (
        f"dtkit: the run {name} {verb} at step {status.step:,}{rank}: "
        f"{formatting.sanitize_text(text, _MAX_ERROR_CHARS)}; {_describe_remedy(_find_variable(run))}"
    )


def _describe_remedy(variable: str) -> str:
    if not variable:
        return "the run as the last line of a cell shows its views, and its `.exception` the whole error"
    return f"`{variable}` shows its views, {variable}.exception the whole error"


def _find_variable(run: RunView) -> str:
    """Return the user's only variable that holds the run; "" without one, or if there are several.

    IPython keeps results under names that begin with an underscore.
    """
    shell = get_shell()
    namespace = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    names = [name for name, value in dict(namespace).items() if value is run and not name.startswith("_")]
    return names[0] if len(names) == 1 else ""


def _find_first_line(message: str) -> str:
    """Return the line that says what is wrong: the last one of an error's traceback, before further lines."""
    return next((line for line in message.splitlines() if line.strip()), "").rstrip(".")

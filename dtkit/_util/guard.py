"""Boundaries that catch errors of any kind. `dtkit/engine/server.py` has the only other one, for an engine's replies.

Two kinds of code may raise anything. An error of a user's function becomes a run's exception, a call's result, or an
error with a remedy. An error of a view (a panel, a button, a subscriber) is shown in its place or logged. It never
affects the training. Both must be reported, so every function here takes a function that does so.

The report is called inside the `except`, and no variable here keeps the error. Such a variable would form a cycle:
error, traceback, frame, variable. The cycle would keep models and batches alive until Python's collector runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")
_Fallback = TypeVar("_Fallback")
_Error = TypeVar("_Error", bound=BaseException)

_log = logging.getLogger("dtkit")


def run_guarded(work: Callable[[], _Result], report: Callable[[Exception], _Fallback]) -> _Result | _Fallback:
    """Return the result of `work`. If it raises, return the result of `report`, which may raise another error.

    KeyboardInterrupt and SystemExit aren't caught.
    """
    try:
        return work()
    # broad: a user's function or a view; the error goes to `report`
    except Exception as error:  # noqa: BLE001 - the boundary itself: `report` is what it reports to
        return report(error)


def run_guarded_in_thread(
    work: Callable[[], _Result], report: Callable[[BaseException], _Fallback]
) -> _Result | _Fallback:
    """Call `work` in a thread as :func:`run_guarded` does, but catch KeyboardInterrupt and SystemExit too.

    They would end the thread silently, and a caller would wait forever for its result.
    """
    try:
        return work()
    # broad: as in `run_guarded`, in a thread that nobody joins
    except BaseException as error:  # noqa: BLE001 - the boundary itself: `report` is what it reports to
        return report(error)


def return_error(error: _Error) -> _Error:
    """Return the error, for callers that store it."""
    return error


class Subscribers:
    """Views of a run or a task, to call after every change. Any thread may use them."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        # locks: while a callback is noted
        self._lock = threading.Lock()

    def add(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Add a callback. Return the function that removes it, which may be called repeatedly."""
        if not callable(callback):
            raise TypeError(f"subscribe({callback!r}): it takes a function without arguments")
        with self._lock:
            self._callbacks.append(callback)

        def remove() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return remove

    def notify(self, name: str) -> None:
        """Call each view of `name`. An error in one is logged, and the next view is still called."""
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            run_guarded(callback, lambda error: _log.error("a view of %s failed", name, exc_info=error))

"""Boundaries that catch errors of any kind. `dtkit/engine/server.py` has the only other one, for an engine's replies.

Two kinds of code may raise anything. An error of a user's function becomes a run's exception, a call's result, or an
error with a remedy. An error of a view (a panel, a button, a subscriber) is shown in its place or logged, and never
affects the training. Both must be reported, so every function here takes one that reports.

The report is called inside the `except`, and no variable here keeps the error. Such a variable would form a cycle:
error, traceback, frame, variable. The cycle would keep models and batches alive until Python's collector runs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Result = TypeVar("_Result")
_Fallback = TypeVar("_Fallback")
_Error = TypeVar("_Error", bound=BaseException)

_log = logging.getLogger("dtkit")


def run_guarded(work: Callable[[], _Result], report: Callable[[Exception], _Fallback]) -> _Result | _Fallback:
    """Return the result of `work`. If it raises, return that of `report`, which may raise another error.

    KeyboardInterrupt and SystemExit pass.
    """
    try:
        return work()
    # broad: a user's function or a view; the error goes to `report`
    except Exception as error:  # noqa: BLE001 - the boundary itself: `report` is what it reports to
        return report(error)


def run_guarded_in_thread(
    work: Callable[[], _Result], report: Callable[[BaseException], _Fallback]
) -> _Result | _Fallback:
    """Call `work` as :func:`run_guarded` does, and catch KeyboardInterrupt and SystemExit too: for a thread.

    They would end the thread silently, and a caller that waits for its result would wait for ever.
    """
    try:
        return work()
    # broad: as in `run_guarded`, in a thread that nobody joins
    except BaseException as error:  # noqa: BLE001 - the boundary itself: `report` is what it reports to
        return report(error)


def return_error(error: _Error) -> _Error:
    """Return the error: the report for a caller that keeps it."""
    return error


def notify_views(views: Iterable[Callable[[], None]], name: str) -> None:
    """Call each view of the run or task `name`. An error in one is logged, and the next view is still called."""
    for view in views:
        run_guarded(view, lambda error: _log.error("a view of %s failed", name, exc_info=error))

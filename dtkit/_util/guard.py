"""Where an error of any kind is caught: here, and in an engine's answer (`dtkit/engine/server.py`), nowhere else.

Two things may fail in ways that nobody can list. What a user's function raises belongs to whoever asked for it: it
becomes a run's exception, a call's result, or an error that says what to do. What a view raises (a panel, a button on
a page, a subscriber) is shown in its place or logged, and never touches the training. Either way somebody must hear of
it, so there is no catching here without a function to report to.

That function gets the error inside the `except`, and nothing here outlives it. Who writes an error into a variable
makes a cycle (the error has its traceback, that has the frames, and one of them has the variable), which keeps alive
what any of these frames hold, models and batches too, until Python's collector comes by.
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
    """What `work` returns; where it raises, what `report` makes of the error, which may be another error.

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

    They would end the thread in silence, and whoever waits for its answer would wait for ever.
    """
    try:
        return work()
    # broad: as in `run_guarded`, in a thread that nobody joins
    except BaseException as error:  # noqa: BLE001 - the boundary itself: `report` is what it reports to
        return report(error)


def return_error(error: _Error) -> _Error:
    """The error: what to report to for one who keeps it."""
    return error


def notify_views(views: Iterable[Callable[[], None]], name: str) -> None:
    """Call each view of what is called `name`. An error in one is logged; the next is called all the same."""
    for view in views:
        run_guarded(view, lambda error: _log.error("a view of %s failed", name, exc_info=error))

"""Waiting for something to happen in a run, without polling."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.arguments import suggest_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.training.run import Run


@suggest_arguments
def wait_until(run: Run, condition: Callable[[], bool], timeout: float = timeouts.LESSON_TIMEOUT_S) -> None:
    """Wait until `condition()` is true. It is checked now and after each change of the run.

    Raises TimeoutError after `timeout` seconds.
    """
    if not hasattr(run, "subscribe"):
        raise TypeError(f"run={run!r}; it must be a run of cluster.train")
    if not callable(condition):
        raise TypeError(f"condition={condition!r}; it must be a function, as in lambda: run.status.step > 10")
    is_met = threading.Event()

    def check() -> None:
        if condition():
            is_met.set()

    unsubscribe = run.subscribe(check)
    try:
        if not (condition() or is_met.wait(timeout)):
            raise TimeoutError(f"the condition is still false after {timeout:g} s; the run is {run.status.state.value}")
    finally:
        unsubscribe()

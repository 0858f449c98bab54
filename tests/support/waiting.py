"""Waits with a time limit."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import dtkit


SOON_S = 20.0
"""Seconds: below each time limit of engines, above what a loaded machine needs."""


@contextlib.contextmanager
def ends_soon() -> Iterator[None]:
    """Check that the block ends by itself, before any time limit ends it."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SOON_S


def wait_until(condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    """Wait until the condition holds, and return its value."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline
        pause.wait(0.02)
    return value


def wait_until_run(run: dtkit.Run, reached: Callable[[], bool], timeout: float = 60) -> None:
    """Wait until `reached()` holds; it is called whenever the run changes."""
    changed = threading.Event()
    unsubscribe = run.subscribe(changed.set)
    try:
        while not reached():
            changed.clear()
            if not reached():
                assert changed.wait(timeout), f"nothing happened within {timeout} s: {run.status}"
    finally:
        unsubscribe()

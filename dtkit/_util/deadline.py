"""Time limits of operations that make several calls, or wait for a condition."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadline:
    """Moment by which `action` must have ended. Without `seconds`, there is no limit."""

    def __init__(self, seconds: float | None, action: str) -> None:
        self._seconds, self._action = seconds, action
        self._ends_at = math.inf if seconds is None else time.monotonic() + seconds

    def get_remaining_s(self) -> float | None:
        """Return the remaining seconds for the next call; None without a limit. Raises TimeoutError if none remain."""
        if self._seconds is None:
            return None
        remaining = self._ends_at - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{self._action} has not ended within timeout={self._seconds:g} s; give it longer")
        return remaining


def wait_until(condition: Callable[[], bool], timeout: float, poll_s: float = timeouts.PROCESS_POLL_S) -> bool:
    """Wait until `condition` is true; return whether it became true in time."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(poll_s)
    return True


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or for some seconds.

    `asyncio.wait_for` of Python 3.11 swallows a cancellation that comes in the moment in which the event is set.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            # waits: within a timeout
            await event.wait()

"""A limit on how often views update, with the updates on a thread of their own.

The run triggers updates from its driver thread after every dispatch. There, a trigger takes a lock, and starts a timer
at most once in each interval. The update runs on the timer's thread, so neither its time nor its errors affect the
training. A trigger during an update schedules another one, so the last state is always shown.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util.guard import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("dtkit.dashboard")


def start_timer(delay: float, callback: Callable[[], None]) -> None:
    """Call `callback` after `delay` seconds on a daemon thread."""
    timer = threading.Timer(delay, callback)
    timer.name = "dtkit-view"
    timer.daemon = True
    timer.start()


class Throttle:
    """Calls `callback` soon after :meth:`trigger`, at most once every `interval` seconds.

    Tests replace `clock` and `call_later`.
    """

    def __init__(
        self,
        callback: Callable[[], None],
        interval: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], None] = start_timer,
    ) -> None:
        self._callback, self._clock, self._call_later = callback, clock, call_later
        self.interval = interval
        """Shortest time between two calls, in seconds."""
        # locks: for a few assignments
        self._lock = threading.Lock()
        self._last_call_at = float("-inf")
        self._scheduled = self._running = self._is_retriggered = self._closed = False
        self._reported: set[str] = set()

    def trigger(self) -> None:
        """Schedule a call. Any thread may trigger; the call runs on another one."""
        with self._lock:
            if self._closed or self._scheduled:
                return
            if self._running:
                self._is_retriggered = True
                return
            self._scheduled = True
            delay = max(0.0, self._last_call_at + self.interval - self._clock())
        self._call_later(delay, self._run_callback)

    def close(self) -> None:
        """Prevent further calls."""
        with self._lock:
            self._closed = True

    def _run_callback(self) -> None:
        with self._lock:
            self._scheduled = False
            if self._closed:
                return
            self._running, self._is_retriggered, self._last_call_at = True, False, self._clock()
        run_guarded(self._callback, self._log_error)
        with self._lock:
            self._running = False
            is_retriggered = self._is_retriggered
        if is_retriggered:
            self.trigger()

    def _log_error(self, error: Exception) -> None:
        """Log an error once, and not at every update."""
        text = f"{type(error).__name__}: {error}"
        if text not in self._reported:
            self._reported.add(text)
            log.warning("a view failed; the training goes on: %s", text, exc_info=error)

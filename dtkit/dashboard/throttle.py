"""At most so many calls a second, off the caller's thread, and always one after the last poke.

The run pokes from its driver thread after every dispatch; what a poke costs there is a lock and, at most
every `interval`, the start of a timer. The work itself runs on the timer's thread, so neither its time nor
its errors reach the training. A poke during a call schedules one more: the last state is always shown.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util.guard import attempt

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("dtkit.dashboard")


def on_timer(delay: float, call: Callable[[], None]) -> None:
    """Run `call` after `delay` seconds on a daemon thread."""
    timer = threading.Timer(delay, call)
    timer.name = "dtkit-view"
    timer.daemon = True
    timer.start()


class Throttle:
    """Calls `work` soon after :meth:`poke`, at most once every `interval` seconds.

    `clock` and `later` are seams for tests: the time, and how to run something after a delay.
    """

    def __init__(
        self,
        work: Callable[[], None],
        interval: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = on_timer,
    ) -> None:
        self._work, self._interval, self._clock, self._later = work, interval, clock, later
        # locks: for a few assignments
        self._lock = threading.Lock()
        self._last = float("-inf")
        self._scheduled = self._running = self._again = self._closed = False
        self._reported: set[str] = set()

    def poke(self) -> None:
        """Something changed. Safe from any thread; does no work on it."""
        with self._lock:
            if self._closed or self._scheduled:
                return
            if self._running:
                self._again = True
                return
            self._scheduled = True
            delay = max(0.0, self._last + self._interval - self._clock())
        self._later(delay, self._run)

    def close(self) -> None:
        """No call begins after this."""
        with self._lock:
            self._closed = True

    def _run(self) -> None:
        with self._lock:
            self._scheduled = False
            if self._closed:
                return
            self._running, self._again, self._last = True, False, self._clock()
        attempt(self._work, self._report)
        with self._lock:
            self._running = False
            again = self._again
        if again:
            self.poke()

    def _report(self, error: Exception) -> None:
        """Log an error once, not four times a second."""
        text = f"{type(error).__name__}: {error}"
        if text not in self._reported:
            self._reported.add(text)
            log.warning("a view failed; the training goes on: %s", text, exc_info=error)

"""A limit on how often views update, with the updates on a thread of their own.

The run triggers updates from its driver thread after every dispatch. There, a trigger takes a lock, and starts a timer
at most once in each interval. The update runs on the timer's thread, so neither its time nor its errors affect the
training. A trigger during an update schedules another one, so the last state is always shown.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.guard import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("dtkit.dashboard")
VIEW_NICENESS = 5
"""How much lower a view's priority is than that of its process; see :manpage:`nice(2)`."""


def start_timer(delay: float, callback: Callable[[], None]) -> None:
    """Call `callback` after `delay` seconds on a daemon thread of low priority."""
    start_prompt_timer(delay, functools.partial(_call_at_low_priority, callback))


def start_prompt_timer(delay: float, callback: Callable[[], None]) -> None:
    """Call `callback` after `delay` seconds on a daemon thread with the priority of the caller's."""
    timer = threading.Timer(delay, callback)
    timer.name = "dtkit-view"
    timer.daemon = True
    timer.start()


def _call_at_low_priority(callback: Callable[[], None]) -> None:
    """Call `callback`, mostly while engines on the same cores wait. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a container may forbid it
            niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + VIEW_NICENESS
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    callback()


class Throttle:
    """Calls `callback` soon after :meth:`trigger`, at most once every `interval` seconds.

    Tests replace `clock` and `call_later`.
    """

    def __init__(
        self,
        callback: Callable[[], None],
        interval: float,
        *,
        pressing_interval: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], None] = start_timer,
    ) -> None:
        self._callback, self._clock, self._call_later = callback, clock, call_later
        self.interval = interval
        """Shortest time between two calls, in seconds."""
        self._pressing_interval = interval if pressing_interval is None else pressing_interval
        # locks: for a few assignments
        self._lock = threading.Lock()
        self._last_call_at = float("-inf")
        self._due_at: float | None = None  # the time of the next call
        self._running = self._closed = False
        self._again: tuple[bool, float] | None = None  # a trigger during a call: whether it presses, and its delay
        self._reported: set[str] = set()

    def trigger(self, *, is_pressing: bool = False, delay_s: float = 0.0) -> None:
        """Schedule a call, `delay_s` seconds from now at the earliest. Any thread may trigger; it runs on another one.

        A pressing call waits only for the pressing interval, or else for the interval that the throttle began with.
        """
        with self._lock:
            if self._closed:
                return
            if self._running:
                presses, least_s = self._again or (False, delay_s)
                self._again = presses or is_pressing, min(least_s, delay_s)
                return
            interval, now = self._pressing_interval if is_pressing else self.interval, self._clock()
            due_at = max(now + delay_s, self._last_call_at + interval)
            if self._due_at is not None and self._due_at <= due_at:
                return
            self._due_at = due_at
        self._call_later(due_at - now, self._run_callback)

    def close(self) -> None:
        """Prevent further calls."""
        with self._lock:
            self._closed = True

    def _run_callback(self) -> None:
        with self._lock:
            now = self._clock()
            if self._closed or self._due_at is None or now < self._due_at - timeouts.TIMER_TOLERANCE_S:
                return  # an earlier timer has made this call
            self._due_at, self._last_call_at = None, now
            self._running, self._again = True, None
        run_guarded(self._callback, self._log_error)
        again = self._end_call()
        if again is not None:
            self.trigger(is_pressing=again[0], delay_s=again[1])

    def _end_call(self) -> tuple[bool, float] | None:
        """Return whether the next call presses and its delay, if one was triggered during this one."""
        with self._lock:
            self._running = False
            return self._again

    def _log_error(self, error: Exception) -> None:
        """Log an error once, and not at every update."""
        text = f"{type(error).__name__}: {error}"
        if text not in self._reported:
            self._reported.add(text)
            log.warning("a view failed; the training goes on: %s", text, exc_info=error)

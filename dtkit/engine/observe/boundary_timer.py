"""What one rank does between two dispatches of a job, and for how long: a step's record has no such times.

The next dispatch that takes steps returns them. The rest of the time between both, in which the rank waits for the
notebook or for a callback, is in "all".
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from dtkit.history.between_steps import ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class BoundaryTimer:
    """Seconds since the end of the last steps. Tests replace `clock`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ended_at: float | None = None
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Add the time of the context."""
        begun = self._clock()
        try:
            yield
        finally:
            self._seconds[kind] = self._seconds.get(kind, 0.0) + self._clock() - begun

    @contextlib.contextmanager
    def leave_out_steps(self) -> Iterator[None]:
        """Leave out the time of the context, in which steps are taken."""
        if self._ended_at is not None:
            self._seconds[ALL] = self._seconds.get(ALL, 0.0) + self._clock() - self._ended_at
        try:
            yield
        finally:
            self._ended_at = self._clock()

    def take(self, *, has_steps: bool) -> Mapping[str, float]:
        """Return the seconds by kind before the steps that have just ended; those without steps count later."""
        if not has_steps:
            return {}
        seconds, self._seconds = self._seconds, {}
        return seconds if ALL in seconds else {}  # before the first steps, nothing is between two

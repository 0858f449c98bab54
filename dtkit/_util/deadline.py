"""The time limit of an action that makes several calls."""

from __future__ import annotations

import math
import time


class Deadline:
    """Moment until which `action` must have ended; never, without `seconds`."""

    def __init__(self, seconds: float | None, action: str) -> None:
        self._seconds, self._action = seconds, action
        self._ends_at = math.inf if seconds is None else time.monotonic() + seconds

    def get_remaining_s(self) -> float | None:
        """Return the seconds that are left for the next call, None without a limit. TimeoutError if none are."""
        if self._seconds is None:
            return None
        remaining = self._ends_at - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{self._action} has not ended within timeout={self._seconds:g} s; give it longer")
        return remaining

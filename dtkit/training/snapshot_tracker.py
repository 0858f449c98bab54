"""When the next snapshot in the engines' memory is due, and whether the last one could be kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.training.config import SnapshotInterval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import SnapshotReport

_MAX_TIME_FRACTION = 0.01  # of the time, that training may wait for snapshots
NEVER_DUE = 2**31
"""Steps until something is due that never will be."""


def count_steps_left(step: int, every: int) -> int:
    """Return the steps from `step` to the next multiple of `every`."""
    return every - step % every


class SnapshotTracker:
    """When a run's next snapshot in its engines' memory is due.

    Snapshots are for strategies of which a rank holds the only copy of a part: see
    :mod:`dtkit.engine.state.peer_snapshots`. Training waits for them, so by default the interval grows until that is a
    hundredth of the time, up to the interval of those on disk (:mod:`dtkit.checkpoint.manager`).
    """

    def __init__(self, interval: SnapshotInterval | None = None) -> None:
        self.interval = interval or SnapshotInterval()
        self._last_request = 0, time.monotonic()
        self._is_due_now = False
        self._min_interval_s = 0.0  # from the time that the last one took
        self._has_warned = False

    def reset_to(self, step: int) -> None:
        """Continue from `step`, of which no engine holds a snapshot."""
        self._last_request, self._is_due_now = (step, time.monotonic()), step > 0

    def is_due(self, step: int) -> bool:
        """Return whether to take one after this step."""
        every, seconds = self.interval.every_steps, self.interval.every_seconds
        if self.interval.is_disabled or self._is_due_now:
            return self._is_due_now and not self.interval.is_disabled
        if step <= self._last_request[0]:
            return False
        if every is not None:
            return step % every == 0
        return time.monotonic() - self._last_request[1] >= max(seconds or 0.0, self._min_interval_s)

    def is_missing(self, step: int) -> bool:
        """Return whether steps were taken since the last one: a run that pauses may do so for long, or for good."""
        return not self.interval.is_disabled and step > self._last_request[0]

    def steps_until_due(self, step: int) -> int:
        """Return the steps until the next one is due."""
        every = self.interval.every_steps
        return NEVER_DUE if every is None else count_steps_left(step, every)

    def on_sent(self, step: int) -> None:
        """Note that one was asked for."""
        self._last_request, self._is_due_now = (step, time.monotonic()), False

    def on_cancel(self) -> None:
        """Note that ranks were not at that step: it is due again."""
        self._is_due_now = True

    def on_result(self, values: Sequence[SnapshotReport]) -> str | None:
        """Note what the ranks answered; return a warning the first time that none could be kept."""
        self._min_interval_s = min(
            timeouts.MAX_SNAPSHOT_INTERVAL_S, max(value["seconds"] for value in values) / _MAX_TIME_FRACTION
        )
        error = values[0]["error"]
        if error is None or self._has_warned:
            return None
        self._has_warned = True
        return f"no snapshot is kept in memory, only on disk: {error}"

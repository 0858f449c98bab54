"""Timing of snapshots in the engines' memory, and whether the last one could be kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.training.config import SnapshotInterval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.messages import SnapshotReport

_MAX_TIME_FRACTION = 0.01  # share of the time that training may wait for snapshots
_FIRST_FRACTION = 0.1  # of the interval, after which the first one is due; the next ones follow at doubled times
NEVER_DUE = 2**31
"""Steps until something that is never due."""


def count_steps_left(step: int, every: int) -> int:
    """Return the steps from `step` to the next multiple of `every`."""
    return every - step % every


class SnapshotTracker:
    """Decides when a run's next snapshot in the engines' memory is due.

    Snapshots are for strategies in which only one rank holds some part of the model: see
    :mod:`dtkit.engine.state.peer_snapshots`. Training waits for them. So by default, the interval grows until the
    wait is a hundredth of the time. The first ones follow sooner, so that a short run loses little, too. The limit
    is the interval of snapshots on disk (:mod:`dtkit.checkpoint.manager`).
    """

    def __init__(self, interval: SnapshotInterval | None = None) -> None:
        self.interval = interval or SnapshotInterval()
        self._started_at = time.monotonic()
        self._last_request = 0, self._started_at
        self._is_due_now = False
        self._min_interval_s = 0.0  # derived from the time that the last one took
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
        last_at, seconds = self._last_request[1], seconds or 0.0
        interval_s = min(seconds, max(_FIRST_FRACTION * seconds, last_at - self._started_at))
        return time.monotonic() - last_at >= max(interval_s, self._min_interval_s)

    def is_missing(self, step: int, *, is_brief: bool = False) -> bool:
        """Return whether steps were taken since the last one. A run may pause for long, or for good.

        With `is_brief`, as between single steps, the last one must also be so old that another takes a small share.
        """
        is_new = not self.interval.is_disabled and step > self._last_request[0]
        age_s = time.monotonic() - self._last_request[1]
        return is_new and not (is_brief and age_s < self._min_interval_s)

    def steps_until_due(self, step: int) -> int:
        """Return the steps until the next one is due."""
        every = self.interval.every_steps
        return NEVER_DUE if every is None else count_steps_left(step, every)

    def on_sent(self, step: int) -> None:
        """Note that one was requested."""
        self._last_request, self._is_due_now = (step, time.monotonic()), False

    def on_cancel(self) -> None:
        """Note that ranks were not at that step, so that it is due again."""
        self._is_due_now = True

    def on_result(self, values: Sequence[SnapshotReport]) -> str | None:
        """Note the ranks' answers. Return a warning the first time that no snapshot could be kept."""
        self._min_interval_s = min(
            timeouts.MAX_SNAPSHOT_INTERVAL_S, max(value["seconds"] for value in values) / _MAX_TIME_FRACTION
        )
        error = values[0]["error"]
        if error is None or self._has_warned:
            return None
        self._has_warned = True
        return f"no snapshot is kept in memory, only on disk: {error}"

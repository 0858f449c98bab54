"""A run's snapshots in its engines' memory, as the notebook sees to them: when one is due, and what the log says.

They are for strategies of which a rank holds the only copy of a part: see :mod:`dtkit.engine.state.peer_snapshots` for
what an engine does. Training stands still for it, so unless steps are given the next one waits until that is a
hundredth of the time at most, but no longer than until there is one on disk. Those (:mod:`dtkit.checkpoint.manager`)
are for what is lost together with its copy.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_INTERVAL_S, MAX_INTERVAL_S = 10.0, 30.0  # from one to the next
_MAX_TIME_FRACTION = 0.01  # of the time, that training may stand still for them
_NEVER_DUE = 2**31


@dataclasses.dataclass(frozen=True)
class SnapshotInterval:
    """From one snapshot to the next: steps, or else seconds at least. Neither: there are none."""

    every_steps: int | None = None
    every_seconds: float | None = None

    @property
    def is_disabled(self) -> bool:
        """Whether there are none."""
        return self.every_steps is None and self.every_seconds is None


class SnapshotTracker:
    """Those of one run. All is called by the run's driver."""

    def __init__(self, interval: SnapshotInterval | None = None) -> None:
        self.interval = interval or SnapshotInterval()
        self._last_request = 0, time.monotonic()
        self._is_due_now = False
        self._min_interval_s = 0.0  # as the last one was long
        self._has_warned = False

    def reset_to(self, step: int) -> None:
        """A run begins, or goes on, at a step whose state lies in nobody's memory but as it is in use."""
        self._last_request, self._is_due_now = (step, time.monotonic()), step > 0

    def is_due(self, step: int) -> bool:
        """Whether to take one after so many steps."""
        every, seconds = self.interval.every_steps, self.interval.every_seconds
        if self.interval.is_disabled or self._is_due_now:
            return self._is_due_now and not self.interval.is_disabled
        if step <= self._last_request[0]:
            return False
        if every is not None:
            return step % every == 0
        return time.monotonic() - self._last_request[1] >= max(seconds or 0.0, self._min_interval_s)

    def is_missing(self, step: int) -> bool:
        """Whether none was asked for since: a run that comes to rest there may do so for long, or for good."""
        return not self.interval.is_disabled and step > self._last_request[0]

    def steps_until_due(self, step: int) -> int:
        """Steps until the next one is due."""
        every = self.interval.every_steps
        return _NEVER_DUE if every is None else every - step % every

    def on_sent(self, step: int) -> None:
        """It is asked for."""
        self._last_request, self._is_due_now = (step, time.monotonic()), False

    def on_cancel(self) -> None:
        """Ranks did not stand at that step: it is due again."""
        self._is_due_now = True

    def on_result(self, values: Sequence[Any]) -> str | None:
        """All ranks have answered. What is to be said of it, the first time that none is kept."""
        self._min_interval_s = min(MAX_INTERVAL_S, max(value["seconds"] for value in values) / _MAX_TIME_FRACTION)
        error = values[0]["error"]
        if error is None or self._has_warned:
            return None
        self._has_warned = True
        return f"no snapshot is kept in memory, only on disk: {error}"

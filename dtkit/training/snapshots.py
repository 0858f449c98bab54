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

SECONDS, MOST_S = 10.0, 30.0  # from one to the next
_SHARE = 0.01  # of the time, that training may stand still for them
_FAR = 2**31


@dataclasses.dataclass(frozen=True)
class Rhythm:
    """From one snapshot to the next: steps, or else seconds at least. Neither: there are none."""

    every: int | None = None
    seconds: float | None = None

    @property
    def none(self) -> bool:
        """Whether there are none."""
        return self.every is None and self.seconds is None


class Snapshots:
    """Those of one run. All is called by the run's driver."""

    def __init__(self, rhythm: Rhythm | None = None) -> None:
        self.rhythm = rhythm or Rhythm()
        self._asked = 0, time.monotonic()
        self._now = False
        self._pause_s = 0.0  # as the last one was long
        self._told = False

    def begin_at(self, step: int) -> None:
        """A run begins, or goes on, at a step whose state lies in nobody's memory but as it is in use."""
        self._asked, self._now = (step, time.monotonic()), step > 0

    def due(self, step: int) -> bool:
        """Whether to take one after so many steps."""
        every, seconds = self.rhythm.every, self.rhythm.seconds
        if self.rhythm.none or self._now:
            return self._now and not self.rhythm.none
        if step <= self._asked[0]:
            return False
        if every is not None:
            return step % every == 0
        return time.monotonic() - self._asked[1] >= max(seconds or 0.0, self._pause_s)

    def lacking(self, step: int) -> bool:
        """Whether none was asked for since: a run that comes to rest there may do so for long, or for good."""
        return not self.rhythm.none and step > self._asked[0]

    def room(self, step: int) -> int:
        """Steps until the next one is due."""
        every = self.rhythm.every
        return _FAR if every is None else every - step % every

    def sent(self, step: int) -> None:
        """It is asked for."""
        self._asked, self._now = (step, time.monotonic()), False

    def refused(self) -> None:
        """Ranks did not stand at that step: it is due again."""
        self._now = True

    def landed(self, values: Sequence[Any]) -> str | None:
        """All ranks have answered. What is to be said of it, the first time that none is kept."""
        self._pause_s = min(MOST_S, max(value["seconds"] for value in values) / _SHARE)
        error = values[0]["error"]
        if error is None or self._told:
            return None
        self._told = True
        return f"no snapshot is kept in memory, only on disk: {error}"

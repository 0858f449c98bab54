"""Who keeps the others waiting: told when dispatches are sent and land, asked from time to time, from all ranks' words.

As long as dispatches land in time nobody is asked. Once one is overdue, every rank's
:class:`~dtkit.health.status.Standing` is read and compared (:mod:`dtkit.health.diagnosis`).

A rank that moves is never called stuck. One that moves and for which the others wait most of the time is a straggler:
it is named, and it is up to nobody but the user to do something about it.

Nothing here reads a clock or a file: `probe` does, and the caller says what time it is.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from dtkit.health.diagnosis import AT_ONCE, HALTED, SILENT_S, judge, laggard, mark
from dtkit.health.stall_report import straggler, stuck, together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.health.diagnosis import Seen
    from dtkit.health.stall_report import Finding

_FORGET_S = 5.0  # after which a watchdog's last looks hold none at a rank that was stuck
_RECENT = 50  # dispatches, of which the median step is taken


@dataclasses.dataclass(frozen=True)
class Limits:
    """When to worry, in seconds; `factor` in times what a step should take."""

    least_s: float = 5.0
    """More than the 1.25 s that a word may be old, so that none is from before the dispatch."""
    factor: float = 5.0
    silent_s: float = SILENT_S
    """An engine writes twice a second; older than this, it can't."""
    together_s: float = 30.0
    """For all ranks at once: a long step, or the compilation of the first one, is nobody's fault."""


class Lookout:
    """Of one run. `probe` returns what is known of each rank, by rank."""

    def __init__(self, probe: Callable[[], Sequence[Seen]], limits: Limits | None = None) -> None:
        self.finding: Finding | None = None
        """What is the case as of the last look, its seconds up to date; None while all is well."""
        self._probe, self._limits = probe, limits or Limits()
        self._flights = 0
        self._since = 0.0  # when the oldest dispatch in flight had the engines for itself
        self._recent: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._moved: dict[int, tuple[object, ...]] = {}  # what each rank stood at, at the first look of this alarm
        self._told: tuple[object, ...] | None = None
        self._quiet_until = -math.inf  # before this, shares of waiting tell of what is over
        self._straggler: int | None = None  # named already, and not again with each dispatch

    # -- told by the driver -----------------------------------------------------------------------------------

    def sent(self, now: float) -> None:
        """A dispatch (or any other call) is on its way. `now` is in seconds on any clock that never jumps."""
        if not self._flights:
            self._since = now
        self._flights += 1

    def landed(self, now: float, step_s: float | None = None) -> None:
        """The oldest one has landed; `step_s` is what its steps took each, if it took any."""
        self._flights = max(0, self._flights - 1)
        self._since = now
        if step_s:
            self._recent.append(step_s)

    def reset(self) -> None:
        """Nothing is in flight any more: after a failure, or for a new group."""
        self._flights, self._moved = 0, {}
        self.finding = self._told = self._straggler = None

    @property
    def median_step_s(self) -> float:
        """Of the last dispatches; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    @property
    def limit_s(self) -> float:
        """How long the oldest dispatch may take before anybody is asked, and a rank not move before it is blamed.

        It depends on a step and not on how many there are in a dispatch: within a long one ranks are seen to move.
        """
        return max(self._limits.least_s, self._limits.factor * self.median_step_s)

    @property
    def overdue(self) -> bool:
        """Whether the last look found the oldest dispatch to be late."""
        return bool(self._moved)

    # -- asked by the driver ----------------------------------------------------------------------------------

    def look(self, now: float) -> Finding | None:
        """What is new: a finding, or a recovery. None while nothing has changed."""
        if not self._flights or now - self._since < self.limit_s:
            self._moved = {}
            return self._recovered(now)
        seen = self._probe()
        if self._gone_on(seen):
            return self._recovered(now)
        marks = {one.rank: mark(one) for one in seen}
        self._moved = self._moved or marks
        found = self._stuck(seen)
        if found is None and now >= self._quiet_until:
            found = self._slow(seen, {rank for rank, at in marks.items() if at != self._moved.get(rank)})
        if found is None:
            return None
        self.finding = found
        if found.key == self._told or (found.kind == "straggler" and found.rank == self._straggler):
            return None
        self._told = found.key
        if found.kind == "straggler":
            self._straggler = found.rank
        return found

    def _stuck(self, seen: Sequence[Seen]) -> Finding | None:
        limit = self.limit_s
        verdict = judge(seen, self._limits.silent_s)
        if verdict is not None and verdict.rank is None:
            patience = limit if verdict.cause == "apart" else max(limit, self._limits.together_s)
            return together(verdict.cause, seen) if min(map(_still_as_written, seen)) >= patience else None
        if verdict is not None and verdict.rank is not None:
            one = seen[verdict.rank]
            if verdict.cause in AT_ONCE or _still_as_written(one) >= limit:
                return stuck(verdict.cause, one, len(seen))
        return None

    def _slow(self, seen: Sequence[Seen], moving: set[int]) -> Finding | None:
        slow = laggard(seen)
        return straggler(seen[slow]) if slow is not None and slow in moving else None

    def _gone_on(self, seen: Sequence[Seen]) -> bool:
        """Whether who was stuck moves again, though the dispatch has not landed yet."""
        found = self.finding
        if found is None or found.kind != "stuck" or found.rank is None:
            return False
        return seen[found.rank].process not in HALTED and seen[found.rank].still_s < found.seconds

    def _recovered(self, now: float) -> Finding | None:
        """What was the case is no longer. A straggler goes on being one: nothing to tell."""
        found, self.finding, self._told = self.finding, None, None
        if found is None or found.kind == "straggler":
            return None
        self._quiet_until = now + _FORGET_S
        who = "all ranks go" if found.rank is None else f"rank {found.rank} goes"
        reason = f"{who} on after {found.seconds:.0f} s"
        return dataclasses.replace(found, kind="recovered", reason=reason, remedy="", line="")


def _still_as_written(seen: Seen) -> float:
    """For how long a rank saw itself not move, by the measure of one that is as slow on purpose."""
    return 0.0 if seen.standing is None else seen.standing.still_s / seen.standing.slowness

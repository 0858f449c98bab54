"""Whom do the others wait for: all ranks' words compared, pure.

In this order, a rank is the culprit

1. whose process is stopped or has ended;
2. whose watchdog is silent: C code holds its interpreter;
3. that is not in a collective while others wait in one, or has begun fewer collectives than they have;
4. none alone: all wait, in different places, or all are at work.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.health.status import EngineStatus, find_user_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.health.status import Frame

WATCHDOG_SILENT_S = 2.5
"""An engine's watchdog writes twice a second; a writing older than this says that it can't."""
_MAX_STATUS_AGE_S = 1.25  # a writing older than this may soon turn out to be the last one: nothing is concluded from it
_STRAGGLER_MAX_BLOCKED, _OTHERS_MIN_BLOCKED = (
    0.25,
    0.5,
)  # of its looks a straggler is blocked in less than this, and each of the others in more


@dataclasses.dataclass(frozen=True)
class RankObservation:
    """One rank as the notebook sees it."""

    rank: int
    host: str
    pid: int
    process_state: str
    """"running", "sleeping", "stopped", "ended", or "unknown" (on another host)."""
    status_age_s: float | None = None
    """Seconds since its watchdog wrote; None where there is nothing of this engine to read."""
    status: EngineStatus | None = None
    dumped_stack: tuple[Frame, ...] = ()
    """The serving thread's stack as the process wrote it by itself, where its watchdog is silent."""

    @property
    def stalled_s(self) -> float:
        """For how long nothing has moved there, as far as is known."""
        return 0.0 if self.status is None else self.status.stalled_s + (self.status_age_s or 0.0)

    def format_location(self) -> str:
        """Where it stands: the user's own innermost line if there is one; empty if unknown."""
        found = find_user_frame(self.dumped_stack) or (None if self.status is None else self.status.get_user_frame())
        return "" if found is None else str(found)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Who is to blame, and for what: `cause` is a key of the sentences below."""

    cause: str
    rank: int | None = None


HALTED_STATES = ("stopped", "ended")
"""States of a process that does nothing."""
CERTAIN_CAUSES = ("stopped", "ended", "silent")
"""Causes that need no time to be sure of."""


def diagnose(observations: Sequence[RankObservation], silent_s: float = WATCHDOG_SILENT_S) -> Diagnosis | None:
    """Who the others wait for. Only true if nothing moves: ranks are seen at slightly different moments."""
    halted = next((one for one in observations if one.process_state in HALTED_STATES), None)
    if halted is not None:
        return Diagnosis(halted.process_state, halted.rank)
    standings = [one.status for one in observations if one.status is not None]
    if len(standings) < len(observations) or not observations:
        return None
    ages = {one.rank: one.status_age_s or 0.0 for one in observations}
    silent = [rank for rank, age in ages.items() if age > silent_s]
    if 0 < len(silent) < len(observations):
        return Diagnosis("silent", silent[0])
    return None if max(ages.values()) > _MAX_STATUS_AGE_S else _compare_statuses(standings)


def _compare_statuses(statuses: Sequence[EngineStatus]) -> Diagnosis:
    """All have written a moment ago."""
    free = [one for one in statuses if not _is_waiting(one, statuses)]
    if not free:
        return _find_behind(statuses)
    if len(free) == len(statuses):
        return Diagnosis("together")
    longest = max(free, key=lambda one: one.stalled_s)
    return Diagnosis("returned" if longest.op is None else "away", longest.rank)


def _is_waiting(status: EngineStatus, statuses: Sequence[EngineStatus]) -> bool:
    """Whether a rank waits for others: in a collective, by its stack or by having begun it, or with its work done."""
    if status.op is None:  # in a training it has ended its dispatch; a call it may have left early
        return any(other.op in ("advance", "evaluate") for other in statuses)
    return status.is_blocked or any(_is_ahead(status, other) for other in statuses)


def _is_ahead(status: EngineStatus, other: EngineStatus) -> bool:
    """Whether a rank has begun a collective that another one of the same group has not."""
    if (status.op, status.job) != (other.op, other.job) or status.is_p2p or other.is_p2p:
        return False
    return any(
        count > other.collective_counts[name]
        for name, count in status.collective_counts.items()
        if name in other.collective_counts
    )


def _find_behind(statuses: Sequence[EngineStatus]) -> Diagnosis:
    """All wait: who has begun fewest collectives waits in another one than the rest."""
    last = [s.rank for s in statuses if not any(_is_ahead(s, other) for other in statuses)]
    if len(last) == 1 and len(statuses) > 1:
        return Diagnosis("other", last[0])
    return Diagnosis("apart" if len({str(s.get_user_frame()) for s in statuses}) > 1 else "together")


def find_straggler(observations: Sequence[RankObservation]) -> int | None:
    """The one rank that hardly ever waits while all others wait most of the time; None if there is none."""
    shares = {one.rank: one.status.blocked_fraction for one in observations if one.status is not None}
    known = {rank: share for rank, share in shares.items() if share is not None}
    if len(known) < max(2, len(observations)):
        return None
    least = min(known, key=lambda rank: known[rank])
    others = [share for rank, share in known.items() if rank != least]
    return least if known[least] <= _STRAGGLER_MAX_BLOCKED and min(others) > _OTHERS_MIN_BLOCKED else None


def get_progress_marker(observation: RankObservation) -> tuple[object, ...]:
    """What changes when a rank moves."""
    standing = observation.status
    return () if standing is None else (standing.step, standing.phase, tuple(standing.collective_counts.items()))

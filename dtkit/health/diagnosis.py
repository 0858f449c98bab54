"""Diagnosis of a stall from the statuses of all ranks: the rank that the others wait for.

In this order, the culprit is

1. a rank whose process is stopped or has ended;
2. a rank whose watchdog is silent, since C code holds its interpreter;
3. a rank outside of a collective while others wait in one, or one that has begun fewer collectives;
4. no single rank: all wait in different places, or all compute.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.health.frames import find_user_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.health.frames import Frame
    from dtkit.health.status import EngineStatus

_STRAGGLER_MAX_BLOCKED, _OTHERS_MIN_BLOCKED = 0.25, 0.5
"""Limits on the fraction of blocked samples, of a straggler and of each other rank."""


@dataclasses.dataclass(frozen=True)
class RankObservation:
    """One rank as the notebook sees it."""

    rank: int
    host: str
    pid: int
    process_state: str
    """"running", "sleeping", "stopped", "ended", or "unknown" (on another host)."""
    status_age_s: float | None = None
    """Age of the status in seconds; None without a readable status."""
    status: EngineStatus | None = None
    dumped_stack: tuple[Frame, ...] = ()
    """The serving thread's stack that the process wrote upon a signal, if its watchdog is silent."""

    @property
    def stalled_s(self) -> float:
        """Known seconds without progress."""
        return 0.0 if self.status is None else self.status.stalled_s + (self.status_age_s or 0.0)

    def format_location(self) -> str:
        """Return the innermost user's frame, else the innermost frame, as text; empty if unknown."""
        frame = find_user_frame(self.dumped_stack) or (None if self.status is None else self.status.get_user_frame())
        return "" if frame is None else str(frame)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The culprit, or None for all ranks, and the cause: a key of the texts in `stall_report`."""

    cause: str
    rank: int | None = None


HALTED_STATES = ("stopped", "ended")
"""States of a process that doesn't run."""
_TRAINING_OPERATIONS = ("advance", "evaluate", "take_snapshot", "save_checkpoint")
"""Operations of a run that all ranks perform together."""
CERTAIN_CAUSES = ("stopped", "ended", "silent")
"""Causes that are certain at once."""


def diagnose(observations: Sequence[RankObservation], silent_s: float = timeouts.WATCHDOG_SILENT_S) -> Diagnosis | None:
    """Return the rank that the others wait for. Valid only if nothing moves, since samples differ slightly in time."""
    halted = next((obs for obs in observations if obs.process_state in HALTED_STATES), None)
    if halted is not None:
        return Diagnosis(halted.process_state, halted.rank)
    statuses = [obs.status for obs in observations if obs.status is not None]
    if len(statuses) < len(observations) or not observations:
        return None
    ages = {obs.rank: obs.status_age_s or 0.0 for obs in observations}
    silent = [rank for rank, age in ages.items() if age > silent_s]
    if 0 < len(silent) < len(observations):
        return Diagnosis("silent", silent[0])
    return None if max(ages.values()) > timeouts.MAX_STATUS_AGE_S else _compare_statuses(statuses)


def _compare_statuses(statuses: Sequence[EngineStatus]) -> Diagnosis:
    """Return the diagnosis by recent statuses of all ranks."""
    active = [status for status in statuses if not _is_waiting(status, statuses)]
    if not active:
        return _find_behind(statuses)
    if len(active) == len(statuses):
        return Diagnosis("together")
    longest = max(active, key=lambda status: status.stalled_s)
    return Diagnosis("returned" if longest.op is None else "away", longest.rank)


def _is_waiting(status: EngineStatus, statuses: Sequence[EngineStatus]) -> bool:
    """Return whether a rank waits for others: in a collective, or after its work."""
    if status.op is None:  # in training it has ended or failed; from a call of the user it may have returned early
        return any(other.op in _TRAINING_OPERATIONS for other in statuses)
    return status.is_blocked or any(_is_ahead(status, other) for other in statuses)


def _is_ahead(status: EngineStatus, other: EngineStatus) -> bool:
    """Return whether a rank has begun a collective that another one of the same group has not."""
    if (status.op, status.job) != (other.op, other.job) or status.is_p2p or other.is_p2p:
        return False
    return any(
        count > other.collective_counts[name]
        for name, count in status.collective_counts.items()
        if name in other.collective_counts
    )


def _find_behind(statuses: Sequence[EngineStatus]) -> Diagnosis:
    """Return the diagnosis if all wait: a rank with fewer collectives than the others waits in another one."""
    behind = [status.rank for status in statuses if not any(_is_ahead(status, other) for other in statuses)]
    if len(behind) == 1 and len(statuses) > 1:
        return Diagnosis("other", behind[0])
    locations = {str(status.get_user_frame()) for status in statuses}
    return Diagnosis("apart" if len(locations) > 1 else "together")


def find_straggler(observations: Sequence[RankObservation]) -> int | None:
    """Return the only rank that rarely waits while all others wait most of the time, or None."""
    fractions = {
        obs.rank: obs.status.blocked_fraction
        for obs in observations
        if obs.status is not None and obs.status.blocked_fraction is not None
    }
    if len(fractions) < max(2, len(observations)):
        return None
    rank = min(fractions, key=lambda rank: fractions[rank])
    lowest = fractions.pop(rank)
    return rank if lowest <= _STRAGGLER_MAX_BLOCKED and min(fractions.values()) > _OTHERS_MIN_BLOCKED else None


def get_progress_marker(observation: RankObservation) -> tuple[object, ...]:
    """Return values that change when a rank moves."""
    status = observation.status
    return () if status is None else (status.step, status.phase, tuple(status.collective_counts.items()))

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

from dtkit.health.status import Standing, line_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.health.status import Frame

SILENT_S = 2.5
"""An engine's watchdog writes twice a second; a writing older than this says that it can't."""
_OLD_S = 1.25  # a writing older than this may soon turn out to be the last one: nothing is concluded from it
_LESS, _MORE = 0.25, 0.5  # of its looks a straggler is blocked in less than this, and each of the others in more


@dataclasses.dataclass(frozen=True)
class Seen:
    """One rank as the notebook sees it."""

    rank: int
    host: str
    pid: int
    process: str
    """"running", "sleeping", "stopped", "ended", or "unknown" (on another host)."""
    age_s: float | None = None
    """Seconds since its watchdog wrote; None where there is nothing of this engine to read."""
    standing: Standing | None = None
    dumped: tuple[Frame, ...] = ()
    """The serving thread's stack as the process wrote it by itself, where its watchdog is silent."""

    @property
    def still_s(self) -> float:
        """For how long nothing has moved there, as far as is known."""
        return 0.0 if self.standing is None else self.standing.still_s + (self.age_s or 0.0)

    def line(self) -> str:
        """Where it stands: the user's own innermost line if there is one; empty if unknown."""
        found = line_of(self.dumped) or (None if self.standing is None else self.standing.line())
        return "" if found is None else str(found)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Who is to blame, and for what: `cause` is a key of the sentences below."""

    cause: str
    rank: int | None = None


HALTED = ("stopped", "ended")
"""States of a process that does nothing."""
AT_ONCE = ("stopped", "ended", "silent")
"""Causes that need no time to be sure of."""


def judge(seen: Sequence[Seen], silent_s: float = SILENT_S) -> Verdict | None:
    """Who the others wait for. Only true if nothing moves: ranks are seen at slightly different moments."""
    halted = next((one for one in seen if one.process in HALTED), None)
    if halted is not None:
        return Verdict(halted.process, halted.rank)
    standings = [one.standing for one in seen if one.standing is not None]
    if len(standings) < len(seen) or not seen:
        return None
    ages = {one.rank: one.age_s or 0.0 for one in seen}
    silent = [rank for rank, age in ages.items() if age > silent_s]
    if 0 < len(silent) < len(seen):
        return Verdict("silent", silent[0])
    return None if max(ages.values()) > _OLD_S else _compared(standings)


def _compared(standings: Sequence[Standing]) -> Verdict:
    """All have written a moment ago."""
    free = [one for one in standings if not _waits(one, standings)]
    if not free:
        return _behind(standings)
    if len(free) == len(standings):
        return Verdict("together")
    longest = max(free, key=lambda one: one.still_s)
    return Verdict("returned" if longest.op is None else "away", longest.rank)


def _waits(one: Standing, others: Sequence[Standing]) -> bool:
    """Whether a rank waits for others: in a collective, by its stack or by having begun it, or with its work done."""
    if one.op is None:  # in a training it has ended its dispatch; a call it may have left early
        return any(other.op in ("advance", "evaluate") for other in others)
    return one.blocked or any(_ahead(one, other) for other in others)


def _ahead(one: Standing, other: Standing) -> bool:
    """Whether a rank has begun a collective that another one of the same group has not."""
    if (one.op, one.job) != (other.op, other.job) or one.pairwise or other.pairwise:
        return False
    return any(count > other.counts[name] for name, count in one.counts.items() if name in other.counts)


def _behind(standings: Sequence[Standing]) -> Verdict:
    """All wait: who has begun fewest collectives waits in another one than the rest."""
    last = [s.rank for s in standings if not any(_ahead(s, other) for other in standings)]
    if len(last) == 1 and len(standings) > 1:
        return Verdict("other", last[0])
    return Verdict("apart" if len({str(s.line()) for s in standings}) > 1 else "together")


def laggard(seen: Sequence[Seen]) -> int | None:
    """The one rank that hardly ever waits while all others wait most of the time; None if there is none."""
    shares = {one.rank: one.standing.waited for one in seen if one.standing is not None}
    known = {rank: share for rank, share in shares.items() if share is not None}
    if len(known) < max(2, len(seen)):
        return None
    least = min(known, key=lambda rank: known[rank])
    others = [share for rank, share in known.items() if rank != least]
    return least if known[least] <= _LESS and min(others) > _MORE else None


def mark(one: Seen) -> tuple[object, ...]:
    """What changes when a rank moves."""
    standing = one.standing
    return () if standing is None else (standing.step, standing.phase, tuple(standing.counts.items()))

"""Where a step's time goes: each rank's mean step in phases, and who keeps the others waiting.

The phases are in the order of a step: data, forward, backward, waiting for others, communication, update. Waiting
fills up what a rank is faster than the slowest one, so in a picture the communication of all ranks begins at the same
place. What the clocks of the phases leave over is "other".

The straggler is found from computing time (all but waiting and communication) and named only when two clocks that know
nothing of each other agree: it computes longer than the fast ranks by ``MARGIN``, and another rank really waits.
A rank's computing time is the fast quartile of its recent steps: a step that the scheduler disturbed says nothing about
the machine. Slow ranks that are alike are named together, for speeding up one of them would not help.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.series import MAX_LINES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history import History

PHASES = ("data", "forward", "backward", "waiting", "communication", "update", "other")
"""What a step is made of, in the order of a step."""

STEPS = 50
"""Recent steps over which the means are taken."""

MARGIN = 1.15
"""A straggler computes at least so many times longer than the fast ranks."""

ALIKE = 1.1
"""Ranks whose computing times differ by less than this factor count as equally slow."""

WAITED = 0.08
"""At least this share of a step is waited by the rank that waits most, or nobody is called a straggler."""

ENOUGH = 8
"""Steps before anybody is named."""

_MEASURED = ("data_s", "forward_s", "backward_s", "wait_s", "comm_s", "update_s")
_COMPUTING = ("data_s", "forward_s", "backward_s", "update_s")


@dataclasses.dataclass(frozen=True)
class Straggler:
    """Who keeps whom waiting: `victim` spends `share` of its step waiting for `ranks`."""

    ranks: tuple[int, ...]
    victim: int
    share: float

    @property
    def text(self) -> str:
        """As a sentence: ``node 1 keeps the others waiting: 34 % of node 0's step``."""
        keeps = "keeps" if len(self.ranks) == 1 else "keep"
        return f"{named(self.ranks)} {keeps} the others waiting: {100 * self.share:.0f} % of node {self.victim}'s step"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Mean seconds of the last `steps` steps: shape (ranks, phases); NaN for a rank without rows.

    `compute_s` is each rank's fast quartile of computing time, and `measured` says whether any phase was.
    """

    steps: int
    seconds: np.ndarray
    compute_s: np.ndarray
    straggler: Straggler | None

    @property
    def measured(self) -> bool:
        """Whether steps were taken apart at all; a loop of the user's own may know only how long they were."""
        return bool(np.nansum(self.seconds[:, :-1]) > 0)

    @property
    def waiting(self) -> float | None:
        """The share of all ranks' time that is waited."""
        whole = float(np.nansum(self.seconds))
        return float(np.nansum(self.seconds[:, PHASES.index("waiting")])) / whole if whole > 0 else None


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar of the picture: seconds in each phase."""

    rank: int
    label: str
    seconds: np.ndarray
    slow: bool
    """Whether this rank keeps the others waiting."""


def timing(history: History, ranks: int, steps: int = STEPS) -> Timing:
    """Take the last `steps` steps of a history apart."""
    at = history.totals(history.steps - steps)["step"]
    rows = history.rows(len(history) - steps * ranks)
    rows = rows[(rows["rank"] < ranks) & (rows["rank"] >= 0)]
    if not len(rows):
        return Timing(0, np.full((ranks, len(PHASES)), np.nan), np.full(ranks, np.nan), None)
    seconds = _means(rows, ranks)
    compute = _fast_quartile(rows, at, ranks)
    straggler = _straggler(seconds, compute) if len(at) >= ENOUGH else None
    return Timing(len(at), seconds, compute, straggler)


def _means(rows: np.ndarray, ranks: int) -> np.ndarray:
    """Mean seconds by rank and phase. A phase that is not finite counts as nothing."""
    rank = rows["rank"]
    count = np.bincount(rank, minlength=ranks)
    known = np.stack([np.bincount(rank, _finite(rows[name]), ranks) for name in _MEASURED], axis=1)
    whole = np.bincount(rank, _finite(rows["step_s"]), ranks)
    other = np.maximum(0, whole - known.sum(axis=1))
    with np.errstate(invalid="ignore"):  # no row, no mean
        return np.asarray(np.column_stack([known, other]) / count[:, None])


def _finite(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.nan_to_num(values, posinf=0.0, neginf=0.0))


def _fast_quartile(rows: np.ndarray, at: np.ndarray, ranks: int) -> np.ndarray:
    """Each rank's computing time in its fast steps."""
    table = np.full((len(at), ranks), np.inf)
    row = np.clip(np.searchsorted(at, rows["step"]), 0, len(at) - 1)
    table[row, rows["rank"]] = sum(_finite(rows[name]) for name in _COMPUTING)
    count = np.isfinite(table).sum(axis=0)
    found = np.sort(table, axis=0)[np.maximum(0, (count - 1) // 4), np.arange(ranks)]
    return np.where(count > 0, found, np.nan)


def _straggler(seconds: np.ndarray, compute: np.ndarray) -> Straggler | None:
    """Who keeps the others waiting, where that is beyond doubt."""
    known = np.flatnonzero(np.isfinite(compute))
    if len(known) < 2:
        return None
    times = compute[known]
    slowest, fast = float(times.max()), float(np.quantile(times, 0.25, method="lower"))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = _finite(seconds[:, PHASES.index("waiting")] / seconds.sum(axis=1))
    victim = int(np.argmax(shares))
    if slowest < MARGIN * fast or shares[victim] < WAITED:
        return None
    slow = tuple(int(rank) for rank in known if compute[rank] >= slowest / ALIKE)
    return None if victim in slow else Straggler(slow, victim, float(shares[victim]))


def bars(timing: Timing) -> list[Bar]:
    """A bar a node, or of many the fastest, the median and the slowest one, each by name."""
    known = [int(rank) for rank in np.flatnonzero(np.isfinite(timing.compute_s))]
    slow = timing.straggler.ranks if timing.straggler else ()
    if len(timing.compute_s) <= MAX_LINES:
        return [Bar(rank, f"node {rank}", timing.seconds[rank], rank in slow) for rank in known]
    known.sort(key=lambda rank: (timing.compute_s[rank], rank))
    picked = {"fastest": known[0], "median": known[len(known) // 2], "slowest": known[-1]} if known else {}
    return [Bar(rank, f"{what}: node {rank}", timing.seconds[rank], rank in slow) for what, rank in picked.items()]


def named(ranks: Sequence[int]) -> str:
    """``node 1``, ``nodes 1 and 3``, ``nodes 1, 3, 5 and 12 more``."""
    if len(ranks) == 1:
        return f"node {ranks[0]}"
    first, last = (ranks[:-1], str(ranks[-1])) if len(ranks) <= 4 else (ranks[:3], f"{len(ranks) - 3} more")
    return f"nodes {', '.join(map(str, first))} and {last}"

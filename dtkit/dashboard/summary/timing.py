"""Where a step's time goes: each rank's mean step in phases, and who keeps the others waiting.

The phases are in the order of a step: data, forward, backward, waiting for others, communication, update. Waiting
fills up what a rank is faster than the slowest one, so in a picture the communication of all ranks begins at the same
place. What the clocks of the phases leave over is "other".

The straggler is found from computing time (all but waiting and communication) and named only when two clocks that know
nothing of each other agree: it computes longer than the fast ranks, and another rank really waits. A rank's computing
time is the fast quartile of its recent steps: a step that the scheduler disturbed says nothing about the machine.
Slow ranks that are alike are named together, for speeding up one of them would not help.

On a busy machine times are heavy-tailed, and ranks have bad spells of a hundred steps. So "longer" means three things:
by ``MIN_SLOWDOWN``, by ``TICK`` (spells of a scheduler's making cost less than that in a step), and in so many single steps
that chance names somebody in at most one of a hundred windows (``MAX_CHANCE``, a sign test: it assumes nothing of how times
are distributed). Of 2 ranks nobody is named before step 8, of 4 before step 11, of 256 before step 23.

The stages of a pipeline do different work on the same samples. None of them is slow, so none is named.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.summary.curves import MAX_NODE_LINES, find_rows_without_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history.history import History

PHASES = ("data", "forward", "backward", "waiting", "communication", "update", "other")
"""What a step is made of, in the order of a step."""

WINDOW_STEPS = 50
"""Recent steps over which the means are taken."""

MIN_SLOWDOWN = 1.15
"""A straggler computes at least so many times longer than the fast ranks."""

MIN_EXTRA_S = 2e-3
"""And at least so many seconds: about half of what a scheduler gives to another process at a time. On two busy cores,
where 2 and 4 engines computed for about 1 ms a step, somebody was named in 8 and 20 % of the windows without it, and in
none with it."""

MAX_CHANCE = 0.01
"""Ranks that are equally fast are taken for slower in at most this share of windows, whichever two are compared."""

SIMILAR_FACTOR = 1.1
"""Ranks whose computing times differ by less than this factor count as equally slow."""

MIN_WAIT_SHARE = 0.08
"""At least this share of a step is waited by the rank that waits most, or nobody is called a straggler."""

_PHASE_COLUMNS = ("data_s", "forward_s", "backward_s", "wait_s", "comm_s", "update_s")
_COMPUTE_COLUMNS = ("data_s", "forward_s", "backward_s", "update_s")


@dataclasses.dataclass(frozen=True)
class Straggler:
    """Who keeps whom waiting: `victim` spends `share` of its step waiting for `ranks`."""

    ranks: tuple[int, ...]
    waiting_rank: int
    wait_share: float

    @property
    def text(self) -> str:
        """As a sentence: ``node 1 keeps the others waiting: 34 % of node 0's step``."""
        keeps = "keeps" if len(self.ranks) == 1 else "keep"
        return f"{format_nodes(self.ranks)} {keeps} the others waiting: {100 * self.wait_share:.0f} % of node {self.waiting_rank}'s step"


@dataclasses.dataclass(frozen=True)
class StepTiming:
    """Mean seconds of the last `steps` steps: shape (ranks, phases); NaN for a rank without rows.

    `compute_s` is each rank's fast quartile of computing time, and `is_measured` says whether any phase was.
    """

    num_steps: int
    seconds: np.ndarray
    compute_s: np.ndarray
    straggler: Straggler | None
    is_same_work: bool = True
    """Whether all ranks do the same work, so that one may be called slower than another."""

    @property
    def is_measured(self) -> bool:
        """Whether steps were taken apart at all; a loop of the user's own may know only how long they were."""
        return bool(np.nansum(self.seconds[:, :-1]) > 0)

    @property
    def waiting_share(self) -> float | None:
        """The share of all ranks' time that is waited."""
        whole = float(np.nansum(self.seconds))
        return float(np.nansum(self.seconds[:, PHASES.index("waiting")])) / whole if whole > 0 else None


@dataclasses.dataclass(frozen=True)
class PhaseBar:
    """One bar of the picture: seconds in each phase."""

    rank: int
    label: str
    seconds: np.ndarray
    is_straggler: bool
    """Whether this rank keeps the others waiting."""


def compute_step_timing(history: History, num_ranks: int, num_steps: int = WINDOW_STEPS) -> StepTiming:
    """Take the last `steps` steps of a history apart."""
    at = history.totals(history.num_steps - num_steps)["step"]
    rows = history.rows(len(history) - num_steps * num_ranks)
    rows = rows[(rows["rank"] < num_ranks) & (rows["rank"] >= 0)]
    if len(at):  # where nodes were left out, so many rows reach further back
        rows = rows[rows["step"] >= at[0]]
    if not len(rows):
        return StepTiming(0, np.full((num_ranks, len(PHASES)), np.nan), np.full(num_ranks, np.nan), None)
    seconds, table, alike = (
        _compute_phase_means(rows, num_ranks),
        _tabulate_compute_times(rows, at, num_ranks),
        _is_same_work(rows, num_ranks),
    )
    compute = _compute_fast_quartile(table)
    return StepTiming(len(at), seconds, compute, _find_straggler(seconds, table, compute) if alike else None, alike)


def _is_same_work(rows: np.ndarray, num_ranks: int) -> bool:
    """Whether all ranks do the same work: of a pipeline's stages, which share their samples, one knows the loss."""
    works = rows["samples"] > 0
    told = np.bincount(rows["rank"][works & ~find_rows_without_loss(rows)], minlength=num_ranks) > 0
    silent = np.bincount(rows["rank"][works], minlength=num_ranks) * ~told > 0
    return not (told.any() and silent.any())


def _compute_phase_means(rows: np.ndarray, num_ranks: int) -> np.ndarray:
    """Mean seconds by rank and phase. A phase that is not finite counts as nothing."""
    rank = rows["rank"]
    count = np.bincount(rank, minlength=num_ranks)
    known = np.stack([np.bincount(rank, _zero_nonfinite(rows[name]), num_ranks) for name in _PHASE_COLUMNS], axis=1)
    whole = np.bincount(rank, _zero_nonfinite(rows["step_s"]), num_ranks)
    other = np.maximum(0, whole - known.sum(axis=1))
    with np.errstate(invalid="ignore"):  # no row, no mean
        return np.asarray(np.column_stack([known, other]) / count[:, None])


def _zero_nonfinite(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.nan_to_num(values, posinf=0.0, neginf=0.0))


def _tabulate_compute_times(rows: np.ndarray, steps: np.ndarray, num_ranks: int) -> np.ndarray:
    """Computing time by step and rank; infinite where there is no row."""
    table = np.full((len(steps), num_ranks), np.inf)
    row = np.clip(np.searchsorted(steps, rows["step"]), 0, len(steps) - 1)
    table[row, rows["rank"]] = sum(_zero_nonfinite(rows[name]) for name in _COMPUTE_COLUMNS)
    return table


def _compute_fast_quartile(compute_times: np.ndarray) -> np.ndarray:
    """Each rank's computing time in its fast steps."""
    count = np.isfinite(compute_times).sum(axis=0)
    found = np.sort(compute_times, axis=0)[np.maximum(0, (count - 1) // 4), np.arange(compute_times.shape[1])]
    return np.where(count > 0, found, np.nan)


def _find_straggler(seconds: np.ndarray, compute_times: np.ndarray, fast_quartiles: np.ndarray) -> Straggler | None:
    """Who keeps the others waiting, where that is beyond doubt."""
    known = np.flatnonzero(np.isfinite(fast_quartiles))
    if len(known) < 2:
        return None
    order = known[np.argsort(fast_quartiles[known], kind="stable")]
    slowest, fast = order[-1], order[(len(order) - 1) // 4]
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = _zero_nonfinite(seconds[:, PHASES.index("waiting")] / seconds.sum(axis=1))
    victim = int(np.argmax(shares))
    longer = fast_quartiles[slowest] >= max(MIN_SLOWDOWN * fast_quartiles[fast], fast_quartiles[fast] + MIN_EXTRA_S)
    pairs = len(known) * (len(known) - 1)  # that might have been picked for the comparison
    if (
        not longer
        or shares[victim] < MIN_WAIT_SHARE
        or pairs * _compute_chance(compute_times, slowest, fast) > MAX_CHANCE
    ):
        return None
    slow = tuple(int(rank) for rank in known if fast_quartiles[rank] >= fast_quartiles[slowest] / SIMILAR_FACTOR)
    return None if victim in slow else Straggler(slow, victim, float(shares[victim]))


def _compute_chance(compute_times: np.ndarray, slow: int, fast: int) -> float:
    """How likely `slow` would take longer than `fast` in as many steps as it does, were it a coin's toss in each."""
    both = compute_times[np.isfinite(compute_times[:, [slow, fast]]).all(axis=1)]
    steps, longer = len(both), int((both[:, slow] > both[:, fast]).sum())
    return float(sum(math.comb(steps, k) for k in range(longer, steps + 1)) / 2**steps)


def select_bars(timing: StepTiming, selected_rank: int | None = None) -> list[PhaseBar]:
    """A bar a node, or of many the fastest, the median and the slowest one, each by name, and the one that is chosen.

    Of ranks that do different work, those that have the least and the most of it.
    """
    known = [int(rank) for rank in np.flatnonzero(np.isfinite(timing.compute_s))]
    slow = timing.straggler.ranks if timing.straggler else ()
    if len(timing.compute_s) <= MAX_NODE_LINES:
        return [PhaseBar(rank, f"node {rank}", timing.seconds[rank], rank in slow) for rank in known]
    known.sort(key=lambda rank: (timing.compute_s[rank], rank))
    first, last = ("fastest", "slowest") if timing.is_same_work else ("least work", "most work")
    picked = {first: known[0], "median": known[len(known) // 2], last: known[-1]} if known else {}
    names = {rank: f"{what}: node {rank}" for what, rank in picked.items()}
    if selected_rank in known:
        names.setdefault(selected_rank, f"node {selected_rank}")
    return [PhaseBar(rank, name, timing.seconds[rank], rank in slow) for rank, name in names.items()]


def format_nodes(ranks: Sequence[int]) -> str:
    """``node 1``, ``nodes 1 and 3``, ``nodes 1, 3, 5 and 12 more``."""
    if len(ranks) == 1:
        return f"node {ranks[0]}"
    first, last = (ranks[:-1], str(ranks[-1])) if len(ranks) <= 4 else (ranks[:3], f"{len(ranks) - 3} more")
    return f"nodes {', '.join(map(str, first))} and {last}"

"""The time of a step: each rank's mean step by phase, and the stragglers.

Phases are in the order of a step: data, forward, backward, waiting for others, communication, update. A fast rank waits
for the slowest one. So communication begins at the same position in the bars of all ranks. Time that no phase covers is
"other".

Stragglers are found from computing time, which is all but waiting and communication. A rank is named only if two
independent clocks agree. It computes longer than the fast ranks, and another rank waits. A rank's computing time is the
fast quartile of its recent steps. Steps that the scheduler disturbed don't show the machine's speed. Ranks that are
similarly slow are named together, because a speed-up of one of them would not help.

On a busy machine times are heavy-tailed, and ranks are slow for a hundred steps at a time. So "longer" has three
conditions: by the factor ``MIN_SLOWDOWN``; by ``MIN_EXTRA_S``; and in enough single steps for a sign test. By chance,
the test names a rank in at most one of a hundred windows (``MAX_CHANCE``). It assumes no distribution of times.

Stages of a pipeline do different work on the same samples, so none of them is named.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.curves import MAX_NODE_LINES, find_rows_without_loss
from dtkit.dashboard.summary.step_range import read_thinned_rows
from dtkit.history.growing_array import select_rows
from dtkit.history.remembered import remember_last
from dtkit.history.speed import WHOLE_RUN_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history.history import History

PHASES = ("data", "forward", "backward", "waiting", "communication", "update", "other")
"""Phases of a step, in order."""

WINDOW_STEPS = 50
"""Number of recent steps over which means are taken while a run trains."""

MAX_WHOLE_ROWS = 400_000
"""Rows of the longest run over all of which means are taken after its end."""

MAX_RANGE_ROWS = 20_000
"""About the largest number of rows that means over a range of steps are taken of, so that a look stays cheap."""

MIN_SLOWDOWN = 1.15
"""Smallest ratio of a straggler's computing time to that of the fast ranks."""

MIN_EXTRA_S = 2e-3
"""Smallest extra computing time of a straggler: about half of a scheduler's time slice."""

MAX_CHANCE = 0.01
"""Largest share of windows in which one of equally fast ranks is named."""

SIMILAR_FACTOR = 1.1
"""Largest ratio of the computing times of ranks that count as equally slow."""

MIN_WAIT_SHARE = 0.08
"""Smallest share of a step that the rank with the longest wait spends waiting, if any rank is to be named."""

_MAX_EXACT_STEPS = 500
_PHASE_COLUMNS = ("data_s", "forward_s", "backward_s", "wait_s", "comm_s", "update_s")
_TIME_COLUMNS = (*_PHASE_COLUMNS, "step_s")
_COMPUTE_PLACES = [_TIME_COLUMNS.index(name) for name in ("data_s", "forward_s", "backward_s", "update_s")]


@dataclasses.dataclass(frozen=True)
class Straggler:
    """Slow ranks: `waiting_rank` spends `wait_share` of its step waiting for `ranks`."""

    ranks: tuple[int, ...]
    waiting_rank: int
    wait_share: float

    @property
    def text(self) -> str:
        """A sentence such as ``node 1 keeps the others waiting: 34 % of node 0's step``."""
        verb = "keeps" if len(self.ranks) == 1 else "keep"
        share = f"{100 * self.wait_share:.0f} % of node {self.waiting_rank}'s step"
        return f"{format_nodes(self.ranks)} {verb} the others waiting: {share}"


@dataclasses.dataclass(frozen=True)
class StepTiming:
    """Mean seconds of the last `num_steps` steps: shape (ranks, phases); NaN for a rank without rows.

    `compute_s` is each rank's fast quartile of computing time.
    """

    num_steps: int
    seconds: np.ndarray
    compute_s: np.ndarray
    straggler: Straggler | None
    is_same_work: bool = True
    """Whether all ranks do the same work, so that one may be slower than another."""
    first_step: int = 0
    """The first of these steps."""
    last_step: int = 0
    """The last of these steps."""
    is_whole: bool = False
    """Whether these are all steps of a run that has ended, except for the first one, which warms up."""
    is_since_repair: bool = False
    """Whether these are all steps of a run that has ended since nodes were last replaced or left out, but for one."""

    @property
    def steps_text(self) -> str:
        """The steps, such as ``last 50 steps``, ``all steps but the first``, or ``80 steps since the repair``."""
        if self.is_whole:
            return WHOLE_RUN_STEPS
        if self.is_since_repair:
            return f"{formatting.format_count(self.num_steps, 'step')} since the repair"
        return "last step" if self.num_steps == 1 else f"last {formatting.format_count(self.num_steps, 'step')}"

    @property
    def range_text(self) -> str:
        """The steps by number, such as ``steps 570 to 619``, for a view that is drawn later than others."""
        if self.is_whole:
            return self.steps_text
        first, last = f"{self.first_step:,}", f"{self.last_step:,}"
        return f"step {last}" if first == last else f"steps {first} to {last}"

    @functools.cached_property
    def is_measured(self) -> bool:
        """Whether any phase was measured. A user's own loop may log only the time of its steps."""
        return sum(self._phase_sums[:-1]) > 0

    @property
    def waiting_share(self) -> float | None:
        """Share of all ranks' time that is spent waiting."""
        total = sum(self._phase_sums)
        return self._phase_sums[PHASES.index("waiting")] / total if total > 0 else None

    @functools.cached_property
    def _phase_sums(self) -> list[float]:
        """Seconds of all ranks in each phase."""
        return [float(seconds) for seconds in np.nansum(self.seconds, axis=0)]


@dataclasses.dataclass(frozen=True)
class PhaseBar:
    """A bar of the figure: seconds in each phase."""

    rank: int
    label: str
    seconds: np.ndarray
    is_straggler: bool
    """Whether this rank keeps the others waiting."""


def count_window_steps(history: History) -> int:
    """Return the number of last steps that means are taken over: all of a run that has ended.

    The first step of a run warms up, and is left out. So are the steps up to a repair and the first one after it.
    """
    limit = MAX_WHOLE_ROWS // max(1, history.num_ranks) if is_over(history) else WINDOW_STEPS
    return min(limit, max(1, (count_steps_since_repair(history, limit) or history.num_steps) - 1))


def is_over(history: History) -> bool:
    """Return whether the run of a history was completed, stopped, or ended by an error, and took no step since."""
    ends = ("done", "stop", "error")
    states = (*ends, "start", "resume", "pause", "repair")
    last = next((event for event in reversed(history.events) if event.kind in states), None)
    if last is None or last.kind not in ends:
        return False
    steps = history.read_valid_totals(history.num_steps - 1)["step"]
    return bool(len(steps) and last.step >= steps[-1])


def count_steps_since_repair(history: History, limit: int = WINDOW_STEPS) -> int | None:
    """Return the number of steps since the last repair, at most one more than `limit`; None without a repair."""
    repair = next((event for event in reversed(history.events) if event.kind == "repair"), None)
    if repair is None:
        return None
    steps = history.read_valid_totals(history.num_steps - limit - 1)["step"]
    return int((steps > repair.step).sum())


def read_window(history: History, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last steps, which means are taken over, and their rows."""
    num_steps = count_window_steps(history)
    read = _read_last_steps if num_steps <= WINDOW_STEPS else _read_steps  # a whole run has too many rows to keep
    return read(history, num_ranks, num_steps)


def _read_steps(history: History, num_ranks: int, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    steps = history.read_valid_totals(history.num_steps - num_steps)["step"]
    rows = history.read_valid_rows(history.num_valid_rows - num_steps * num_ranks)
    rows = select_rows(rows, (rows["rank"] < num_ranks) & (rows["rank"] >= 0))
    if len(steps):  # after nodes were left out, these rows reach further back
        rows = select_rows(rows, rows["step"] >= steps[0])
    return steps, rows


_read_last_steps = remember_last(_read_steps)


@remember_last
def compute_step_timing(history: History, num_ranks: int) -> StepTiming:
    """Return the timing of the last steps, the same ones for all views."""
    steps, rows = read_window(history, num_ranks)
    is_whole = is_over(history) and len(steps) > 1 and len(steps) == history.num_steps - 1
    timing = _compute_timing(steps, rows, num_ranks, is_whole=is_whole)
    return dataclasses.replace(timing, is_since_repair=_is_since_repair(history, len(steps)))


def _is_since_repair(history: History, num_steps: int) -> bool:
    """Return whether the last steps of a run that has ended are all those since a repair."""
    num_since = count_steps_since_repair(history, num_steps + 1) if is_over(history) else None
    return num_since is not None and num_since <= num_steps + 1


def compute_range_timing(history: History, num_ranks: int, first_step: int, last_step: int) -> StepTiming:
    """Return the timing of the steps that a page has in sight; of many of them, of some at equal distances."""
    rows = read_thinned_rows(history, first_step, last_step, MAX_RANGE_ROWS)
    rows = select_rows(rows, (rows["rank"] < num_ranks) & (rows["rank"] >= 0))
    return _compute_timing(np.unique(rows["step"]), rows, num_ranks)


def _compute_timing(steps: np.ndarray, rows: np.ndarray, num_ranks: int, *, is_whole: bool = False) -> StepTiming:
    if not len(rows):
        return StepTiming(0, np.full((num_ranks, len(PHASES)), np.nan), np.full(num_ranks, np.nan), None)
    row_seconds, rank = _read_seconds(rows), rows["rank"].astype("i8")
    seconds = _compute_phase_means(row_seconds, rank, num_ranks)
    compute_times = np.full((len(steps), num_ranks), np.inf)  # infinite without a row
    step_index = np.minimum(np.searchsorted(steps, rows["step"]), len(steps) - 1)
    compute_times[step_index, rank] = row_seconds[_COMPUTE_PLACES].sum(axis=0)
    compute_s, is_same_work = _compute_fast_quartile(compute_times), _is_same_work(rows, num_ranks)
    straggler = _find_straggler(seconds, compute_times, compute_s) if is_same_work else None
    first, last = int(rows["step"].min()), int(rows["step"].max())
    return StepTiming(len(steps), seconds, compute_s, straggler, is_same_work, first, last, is_whole)


def _is_same_work(rows: np.ndarray, num_ranks: int) -> bool:
    """Return whether all ranks do the same work. Only the last stage of a pipeline reports a loss."""
    has_samples = rows["samples"] > 0
    reports_loss = np.bincount(rows["rank"][has_samples & ~find_rows_without_loss(rows)], minlength=num_ranks) > 0
    silent = np.bincount(rows["rank"][has_samples], minlength=num_ranks) * ~reports_loss > 0
    return not (reports_loss.any() and silent.any())


def _read_seconds(rows: np.ndarray) -> np.ndarray:
    """Return the seconds in each of ``_TIME_COLUMNS``, of shape (columns, rows). A value that isn't finite is 0."""
    return _zero_nonfinite(np.array([rows[name] for name in _TIME_COLUMNS], "f8"))


def _compute_phase_means(row_seconds: np.ndarray, rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return mean seconds by rank and phase."""
    *phases, total = (np.bincount(rank, seconds, num_ranks) for seconds in row_seconds)
    other = np.maximum(0, total - sum(phases))
    with np.errstate(invalid="ignore"):  # ranks without rows have no mean
        return np.asarray(np.column_stack([*phases, other]) / np.bincount(rank, minlength=num_ranks)[:, None])


def _zero_nonfinite(values: np.ndarray) -> np.ndarray:
    if np.isfinite(values).all():
        return values
    return np.asarray(np.nan_to_num(values, posinf=0.0, neginf=0.0))


def _compute_fast_quartile(compute_times: np.ndarray) -> np.ndarray:
    """Return each rank's computing time in its fast steps."""
    count = np.isfinite(compute_times).sum(axis=0)
    quartiles = np.sort(compute_times, axis=0)[np.maximum(0, (count - 1) // 4), np.arange(compute_times.shape[1])]
    return np.where(count > 0, quartiles, np.nan)


def _find_straggler(seconds: np.ndarray, compute_times: np.ndarray, fast_quartiles: np.ndarray) -> Straggler | None:
    """Return the ranks that keep others waiting, if all conditions hold."""
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
    """Return the chance that `slow` takes longer in this many steps, if either rank were slower with equal chance."""
    both = compute_times[np.isfinite(compute_times[:, [slow, fast]]).all(axis=1)]
    steps, longer = len(both), int((both[:, slow] > both[:, fast]).sum())
    if steps > _MAX_EXACT_STEPS:  # the exact sum of so many large numbers would take long
        return 1 - NormalDist(steps / 2, math.sqrt(steps) / 2).cdf(longer - 0.5)
    return float(sum(math.comb(steps, k) for k in range(longer, steps + 1)) / 2**steps)


def select_bars(timing: StepTiming, selected_rank: int | None = None) -> list[PhaseBar]:
    """Return a bar for each node. Of many nodes, return the fastest, the median, the slowest and the selected one.

    Of many ranks with different work, return those with the least and the most work.
    """
    known = [int(rank) for rank in np.flatnonzero(np.isfinite(timing.compute_s))]
    slow = timing.straggler.ranks if timing.straggler else ()
    if len(timing.compute_s) <= MAX_NODE_LINES:
        return [PhaseBar(rank, f"node {rank}", timing.seconds[rank], rank in slow) for rank in known]
    known.sort(key=lambda rank: (timing.compute_s[rank], rank))
    first, last = ("fastest", "slowest") if timing.is_same_work else ("least work", "most work")
    ranks = {first: known[0], "median": known[len(known) // 2], last: known[-1]} if known else {}
    names = {rank: f"{name}: node {rank}" for name, rank in ranks.items()}
    if selected_rank in known:
        names.setdefault(selected_rank, f"node {selected_rank}")
    return [PhaseBar(rank, name, timing.seconds[rank], rank in slow) for rank, name in names.items()]


def format_nodes(ranks: Sequence[int]) -> str:
    """Return a text such as ``node 1``, ``nodes 1 and 3``, or ``nodes 1, 3, 5 and 12 more``."""
    if len(ranks) == 1:
        return f"node {ranks[0]}"
    first, last = (ranks[:-1], str(ranks[-1])) if len(ranks) <= 4 else (ranks[:3], f"{len(ranks) - 3} more")
    return f"nodes {', '.join(map(str, first))} and {last}"

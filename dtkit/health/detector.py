"""Who keeps the others waiting: told when dispatches are sent and land, asked from time to time, from all ranks' words.

As long as dispatches land in time nobody is asked. Once one is overdue, every rank's
:class:`~dtkit.health.status.EngineStatus` is read and compared (:mod:`dtkit.health.diagnosis`).

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

from dtkit.health.diagnosis import (
    CERTAIN_CAUSES,
    HALTED_STATES,
    WATCHDOG_SILENT_S,
    diagnose,
    find_straggler,
    get_progress_marker,
)
from dtkit.health.stall_report import report_all_stalled, report_straggler, report_stuck

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.health.diagnosis import RankObservation
    from dtkit.health.stall_report import StallReport

_SAMPLE_WINDOW_S = 5.0  # after which a watchdog's last looks hold none at a rank that was stuck
_NUM_RECENT_DISPATCHES = 50  # dispatches, of which the median step is taken


@dataclasses.dataclass(frozen=True)
class DetectorConfig:
    """When to worry, in seconds; `step_factor` in times what a step should take."""

    min_limit_s: float = 5.0
    """More than the 1.25 s that a word may be old, so that none is from before the dispatch."""
    step_factor: float = 5.0
    silent_s: float = WATCHDOG_SILENT_S
    """An engine writes twice a second; older than this, it can't."""
    all_ranks_limit_s: float = 30.0
    """For all ranks at once: a long step, or the compilation of the first one, is nobody's fault."""


class StallDetector:
    """Of one run. `probe` returns what is known of each rank, by rank."""

    def __init__(self, probe: Callable[[], Sequence[RankObservation]], config: DetectorConfig | None = None) -> None:
        self.stall_report: StallReport | None = None
        """What is the case as of the last look, its seconds up to date; None while all is well."""
        self._probe, self._config = probe, config or DetectorConfig()
        self._num_pending = 0
        self._waiting_since = 0.0  # when the oldest dispatch in flight had the engines for itself
        self._recent_step_s: collections.deque[float] = collections.deque(maxlen=_NUM_RECENT_DISPATCHES)
        self._first_markers: dict[
            int, tuple[object, ...]
        ] = {}  # what each rank stood at, at the first look of this alarm
        self._reported_key: tuple[object, ...] | None = None
        self._ignore_stragglers_until = -math.inf  # before this, shares of waiting tell of what is over
        self._reported_straggler: int | None = None  # named already, and not again with each dispatch

    # -- told by the driver -----------------------------------------------------------------------------------

    def on_sent(self, now: float) -> None:
        """A dispatch (or any other call) is on its way. `now` is in seconds on any clock that never jumps."""
        if not self._num_pending:
            self._waiting_since = now
        self._num_pending += 1

    def on_result(self, now: float, step_s: float | None = None) -> None:
        """The oldest one has landed; `step_s` is what its steps took each, if it took any."""
        self._num_pending = max(0, self._num_pending - 1)
        self._waiting_since = now
        if step_s:
            self._recent_step_s.append(step_s)

    def reset(self) -> None:
        """Nothing is in flight any more: after a failure, or for a new group."""
        self._num_pending, self._first_markers = 0, {}
        self.stall_report = self._reported_key = self._reported_straggler = None

    @property
    def median_step_s(self) -> float:
        """Of the last dispatches; 0 before the first."""
        return statistics.median(self._recent_step_s) if self._recent_step_s else 0.0

    @property
    def limit_s(self) -> float:
        """How long the oldest dispatch may take before anybody is asked, and a rank not move before it is blamed.

        It depends on a step and not on how many there are in a dispatch: within a long one ranks are seen to move.
        """
        return max(self._config.min_limit_s, self._config.step_factor * self.median_step_s)

    @property
    def is_overdue(self) -> bool:
        """Whether the last look found the oldest dispatch to be late."""
        return bool(self._first_markers)

    # -- asked by the driver ----------------------------------------------------------------------------------

    def check(self, now: float) -> StallReport | None:
        """What is new: a finding, or a recovery. None while nothing has changed."""
        if not self._num_pending or now - self._waiting_since < self.limit_s:
            self._first_markers = {}
            return self._report_recovery(now)
        seen = self._probe()
        if self._has_resumed(seen):
            return self._report_recovery(now)
        marks = {one.rank: get_progress_marker(one) for one in seen}
        self._first_markers = self._first_markers or marks
        found = self._find_stuck_rank(seen)
        if found is None and now >= self._ignore_stragglers_until:
            found = self._find_moving_straggler(
                seen, {rank for rank, at in marks.items() if at != self._first_markers.get(rank)}
            )
        if found is None:
            return None
        self.stall_report = found
        if found.news_key == self._reported_key or (
            found.kind == "straggler" and found.rank == self._reported_straggler
        ):
            return None
        self._reported_key = found.news_key
        if found.kind == "straggler":
            self._reported_straggler = found.rank
        return found

    def _find_stuck_rank(self, observations: Sequence[RankObservation]) -> StallReport | None:
        limit = self.limit_s
        verdict = diagnose(observations, self._config.silent_s)
        if verdict is not None and verdict.rank is None:
            patience = limit if verdict.cause == "apart" else max(limit, self._config.all_ranks_limit_s)
            return (
                report_all_stalled(verdict.cause, observations)
                if min(map(_get_scaled_stall_s, observations)) >= patience
                else None
            )
        if verdict is not None and verdict.rank is not None:
            one = observations[verdict.rank]
            if verdict.cause in CERTAIN_CAUSES or _get_scaled_stall_s(one) >= limit:
                return report_stuck(verdict.cause, one, len(observations))
        return None

    def _find_moving_straggler(
        self, observations: Sequence[RankObservation], moving_ranks: set[int]
    ) -> StallReport | None:
        slow = find_straggler(observations)
        return report_straggler(observations[slow]) if slow is not None and slow in moving_ranks else None

    def _has_resumed(self, observations: Sequence[RankObservation]) -> bool:
        """Whether who was stuck moves again, though the dispatch has not landed yet."""
        found = self.stall_report
        if found is None or found.kind != "stuck" or found.rank is None:
            return False
        return (
            observations[found.rank].process_state not in HALTED_STATES
            and observations[found.rank].stalled_s < found.stalled_s
        )

    def _report_recovery(self, now: float) -> StallReport | None:
        """What was the case is no longer. A straggler goes on being one: nothing to tell."""
        found, self.stall_report, self._reported_key = self.stall_report, None, None
        if found is None or found.kind == "straggler":
            return None
        self._ignore_stragglers_until = now + _SAMPLE_WINDOW_S
        who = "all ranks go" if found.rank is None else f"rank {found.rank} goes"
        reason = f"{who} on after {found.stalled_s:.0f} s"
        return dataclasses.replace(found, kind="recovered", reason=reason, remedy="", location="")


def _get_scaled_stall_s(observation: RankObservation) -> float:
    """For how long a rank saw itself not move, by the measure of one that is as slow on purpose."""
    return 0.0 if observation.status is None else observation.status.stalled_s / observation.status.delay_factor

"""Detector of ranks that keep the others waiting.

The driver reports when it sends a dispatch and when one returns. If one is overdue, the detector compares all ranks'
:class:`~dtkit.health.status.EngineStatus` (:mod:`dtkit.health.diagnosis`).

A rank that moves is never stuck. If it moves and the others wait for it most of the time, it is a straggler. The
detector reports stragglers, and the user decides what to do.

The detector reads no clock and no file. The caller passes the time, and `probe` reads the files.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.health.diagnosis import CERTAIN_CAUSES, HALTED_STATES, diagnose, find_straggler, get_progress_marker
from dtkit.health.frames import is_compiling, is_importing
from dtkit.health.stall_report import report_all_stalled, report_compiling, report_straggler, report_stuck

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.health.diagnosis import RankObservation
    from dtkit.health.stall_report import StallReport

_NUM_RECENT_DISPATCHES = 50  # for the median step


@dataclasses.dataclass(frozen=True)
class DetectorConfig:
    """Limits in seconds; `step_factor` is relative to the median step."""

    min_limit_s: float = timeouts.STALL_LIMIT_S
    """Longer than the maximal age of a status, so that none is from before the dispatch."""
    step_factor: float = 5.0
    silent_s: float = timeouts.WATCHDOG_SILENT_S
    """Age of a status above which its watchdog counts as silent."""
    all_ranks_limit_s: float = timeouts.ALL_RANKS_STALL_LIMIT_S
    """Limit for a stall of all ranks, which may be a long step or a compilation."""


class StallDetector:
    """Detector of one run. `probe` returns the observation of each rank, in order."""

    def __init__(self, probe: Callable[[], Sequence[RankObservation]], config: DetectorConfig | None = None) -> None:
        self.stall_report: StallReport | None = None
        """Report of the last check, with current seconds; None without a stall."""
        self._probe, self._config = probe, config or DetectorConfig()
        self._num_pending = 0
        self._waiting_since = 0.0  # the time at which engines could start the oldest pending dispatch
        self._recent_step_s: collections.deque[float] = collections.deque(maxlen=_NUM_RECENT_DISPATCHES)
        self._first_markers: dict[int, tuple[object, ...]] = {}  # by rank, at the first check of this overdue dispatch
        self._reported_key: tuple[object, ...] | None = None
        self._ignore_stragglers_until = -math.inf  # blocked fractions still include the last stall
        self._reported_straggler: int | None = None  # reported once, and not again for each dispatch
        self._compiling_since: float | None = None  # the forward and the backward pass are compiled one after the other

    # -- reports by the driver --------------------------------------------------------------------------------

    def on_sent(self, now: float) -> None:
        """Note that a dispatch or another call is sent. `now` is in seconds on a monotonic clock."""
        if not self._num_pending:
            self._waiting_since = now
        self._num_pending += 1

    def on_result(self, now: float, step_s: float | None = None) -> None:
        """Note the result of the oldest call; `step_s` is the seconds per step, if it has steps."""
        self._num_pending = max(0, self._num_pending - 1)
        self._waiting_since = now
        if step_s:
            self._recent_step_s.append(step_s)

    def reset(self) -> None:
        """Forget pending calls, after a failure or for a new group."""
        self._num_pending, self._first_markers = 0, {}
        self.stall_report = self._reported_key = self._reported_straggler = self._compiling_since = None

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step in the last dispatches; 0 before the first."""
        return statistics.median(self._recent_step_s) if self._recent_step_s else 0.0

    @property
    def limit_s(self) -> float:
        """Seconds after which the oldest dispatch is overdue, or a rank without progress is stuck.

        The number of steps in a dispatch has no effect, since ranks move within a long dispatch.
        """
        return max(self._config.min_limit_s, self._config.step_factor * self.median_step_s)

    def measure_waiting_s(self, now: float) -> float:
        """Return for how long the oldest call in flight has been the oldest; 0 without one."""
        return now - self._waiting_since if self._num_pending else 0.0

    # -- checks by the driver ---------------------------------------------------------------------------------

    def check(self, now: float) -> StallReport | None:
        """Return a new report, of a stall or a recovery, or None."""
        if not self._num_pending or self.measure_waiting_s(now) < self.limit_s:
            self._first_markers = {}
            return self._report_recovery(now)
        observations = self._probe()
        if self._has_resumed(observations):
            return self._report_recovery(now)
        markers = {observation.rank: get_progress_marker(observation) for observation in observations}
        self._first_markers = self._first_markers or markers
        report = self._find_stuck_rank(observations)
        if report is not None and report.kind == "compiling" and self._compiling_since is None:
            self._compiling_since = now - report.stalled_s
        if report is None and now >= self._ignore_stragglers_until:
            moving = {rank for rank, marker in markers.items() if marker != self._first_markers.get(rank)}
            report = self._find_moving_straggler(observations, moving)
        if report is None:
            return None
        self.stall_report = report
        return report if self._is_news(report) else None

    def _is_news(self, report: StallReport) -> bool:
        """Return whether a report differs from the last one, and store it as reported."""
        is_straggler = report.kind == "straggler"
        if report.news_key == self._reported_key or (is_straggler and report.rank == self._reported_straggler):
            return False
        self._reported_key = report.news_key
        if is_straggler:
            self._reported_straggler = report.rank
        return True

    def _find_stuck_rank(self, observations: Sequence[RankObservation]) -> StallReport | None:
        diagnosis = diagnose(observations, self._config.silent_s)
        if diagnosis is None:
            return None
        compiling = [obs for obs in observations if obs.status is not None and is_compiling(obs.status.stack)]
        if compiling and diagnosis.cause not in CERTAIN_CAUSES:
            return report_compiling(compiling)
        if diagnosis.rank is None:
            limit_s = self.limit_s
            if diagnosis.cause != "apart":
                limit_s = max(limit_s, self._config.all_ranks_limit_s)
            stalled = min(map(_get_scaled_stall_s, observations)) >= limit_s
            return report_all_stalled(diagnosis.cause, observations) if stalled else None
        culprit = observations[diagnosis.rank]
        limit_s = max(self.limit_s, self._config.all_ranks_limit_s) if _does_this_once(culprit) else self.limit_s
        stuck = diagnosis.cause in CERTAIN_CAUSES or _get_scaled_stall_s(culprit) >= limit_s
        return report_stuck(diagnosis.cause, culprit, len(observations)) if stuck else None

    def _find_moving_straggler(
        self, observations: Sequence[RankObservation], moving_ranks: set[int]
    ) -> StallReport | None:
        slow = find_straggler(observations)
        return report_straggler(observations[slow]) if slow is not None and slow in moving_ranks else None

    def _has_resumed(self, observations: Sequence[RankObservation]) -> bool:
        """Return whether the stuck rank moves again before its dispatch returns."""
        report = self.stall_report
        if report is None or report.kind != "stuck" or report.rank is None:
            return False
        observation = observations[report.rank]
        return observation.process_state not in HALTED_STATES and observation.stalled_s < report.stalled_s

    def _report_recovery(self, now: float) -> StallReport | None:
        """Clear the report, and return one of the recovery; None for a straggler, which may still be one."""
        report, self.stall_report, self._reported_key = self.stall_report, None, None
        compiling_since, self._compiling_since = self._compiling_since, None
        if report is None or report.kind == "straggler":
            return None
        self._ignore_stragglers_until = now + timeouts.STRAGGLER_HOLDOFF_S
        subject = "all ranks go" if report.rank is None else f"rank {report.rank} goes"
        reason = f"{subject} on after {report.stalled_s:.0f} s"
        if report.kind == "compiling" and compiling_since is not None:
            reason = f"the model was compiled in {now - compiling_since:.0f} s or so"
        return dataclasses.replace(report, kind="recovered", reason=reason, remedy="", location="")


def _does_this_once(observation: RankObservation) -> bool:
    """Return whether what a rank does may take long, but only once: an import, or its process's first validation."""
    status = observation.status
    return status is not None and (status.is_warming_up or is_importing(status.stack))


def _get_scaled_stall_s(observation: RankObservation) -> float:
    """Return a rank's seconds without progress, divided by its delay factor."""
    return 0.0 if observation.status is None else observation.status.stalled_s / observation.status.delay_factor

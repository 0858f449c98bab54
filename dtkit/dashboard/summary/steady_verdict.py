"""The verdict as a view shows it over time: a line that stays while the measurements only vary.

Two causes may be nearly equal. Their order then changes with every look, and a line that follows them can't be read.
Another verdict replaces the shown one after it was found in each look for some seconds. Until then the shown cause has
its present numbers. The line is replaced at once where the bars beside it would contradict it: the shown cause is gone,
or another one is far larger. Both need more than a small change of the measurements, so the line doesn't flip back.
Waits for a core come and go with other programs, and no bar shows them: a verdict on these is never replaced at once.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.types import State

if TYPE_CHECKING:
    from dtkit.dashboard.summary.metrics import RunMetrics
    from dtkit.dashboard.summary.timing import Straggler
    from dtkit.dashboard.summary.verdict import Verdict

CLOSE_GAINS = 0.05
"""Difference of the savings, or of a share in the text, from which a verdict of the same cause is another one."""

CLOSE_TIMES = 0.1
"""Share by which a duration in the text may differ from the present one."""

FAR_LARGER = 0.15
"""Difference of the savings from which bars show another cause than the line."""

_IN_TURN = ("straggler", "waiting")  # both say that nodes wait for each other, as the bars do; a test of chance decides
_LEARNING = frozenset({"diverged", "learned nothing"})
_SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


def is_at_rest(state: State) -> bool:
    """Return whether a run takes no steps, so that no later look would correct an older line."""
    return state.has_ended or state is State.PAUSED


class SteadyVerdict:
    """The verdict that a view shows. Not thread-safe. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self.shown: Verdict | None = None
        self._other_cause: str | None = None
        self._other_since = 0.0
        self._straggler: Straggler | None = None
        self._found_ranks: tuple[int, ...] = ()
        self._found_since = 0.0
        self._is_final = False

    def update(self, found: Verdict | None, now: float, *, is_final: bool = False) -> Verdict | None:
        """Return the verdict to show after `found` was found; `is_final` while the run is at rest.

        None, a first verdict, and one on what the model learns show at once. So do other numbers in the same line, and
        a cause that is beyond doubt, which the tiles and bars beside it show too.
        """
        before, self._is_final = self.shown, is_final
        if found is None or before is None or is_final or not _LEARNING.isdisjoint((found.cause, before.cause)):
            return self._show(found)
        if _is_same(found, before):
            self._other_cause = None
            return self._refresh(found, before)
        if found.cause != self._other_cause:
            self._other_cause, self._other_since = found.cause, now
        current = next((other for other in found.others if _is_same(other, before)), None)
        if now - self._other_since >= timeouts.VERDICT_HOLD_S or _is_contradicted(before, current, found):
            return self._show(found)
        return self._refresh(current or before, before)

    def _refresh(self, current: Verdict, before: Verdict) -> Verdict:
        """Show the present numbers of the shown cause, if they differ."""
        is_close = _is_close(current, before) and not _have_times_moved(current.text, before.text)
        self.shown = before if is_close else current
        return self.shown

    def match(self, metrics: RunMetrics, now: float) -> RunMetrics:
        """Return the metrics to show beside the shown verdict: the marks of slow nodes come and go with its line.

        Beside a line about something else, a slow node is named once it was found in each look for some seconds.
        """
        found = metrics.timing.straggler
        straggler = self._match_straggler(found, has_lasted=self._has_lasted(found, now))
        if straggler is found:
            return metrics
        return dataclasses.replace(metrics, timing=dataclasses.replace(metrics.timing, straggler=straggler))

    def _has_lasted(self, found: Straggler | None, now: float) -> bool:
        """Return whether these slow nodes were found in each look for some seconds."""
        ranks = () if found is None else found.ranks
        if ranks != self._found_ranks:
            self._found_ranks, self._found_since = ranks, now
        return now - self._found_since >= timeouts.VERDICT_HOLD_S

    def _match_straggler(self, found: Straggler | None, *, has_lasted: bool) -> Straggler | None:
        if self.shown is None:
            return found
        if self.shown.cause == "straggler":
            if found is not None and found.ranks == self.shown.slow_ranks:
                self._straggler = found
            is_known = self._straggler is not None and self._straggler.ranks == self.shown.slow_ranks
            return self._straggler if is_known else found
        is_doubtful = self.shown.cause == "waiting" or self._other_cause == "straggler"
        return found if not is_doubtful and (has_lasted or self._is_final) else None

    def _show(self, verdict: Verdict | None) -> Verdict | None:
        self.shown, self._other_cause = verdict, None
        return verdict


def _is_contradicted(shown: Verdict, current: Verdict | None, found: Verdict) -> bool:
    """Return whether the measurements contradict the shown verdict, whose present state is `current` if it has any."""
    if (shown.cause in _IN_TURN and found.cause in _IN_TURN) or "cores" in (shown.cause, found.cause):
        return False
    if shown.gain > 0 and current is None:
        return True
    return found.gain - (current.gain if current else 0.0) >= FAR_LARGER


def _is_close(found: Verdict, shown: Verdict) -> bool:
    """Return whether two verdicts on the same cause have the same numbers, as a reader would say."""
    pairs = list(zip(_list_shares(found.text), _list_shares(shown.text), strict=False))
    differences = [found.gain - shown.gain, *(one - other for one, other in pairs)]
    return all(abs(difference) < CLOSE_GAINS for difference in differences)


def _is_same(found: Verdict, shown: Verdict) -> bool:
    return (found.cause, found.slow_ranks) == (shown.cause, shown.slow_ranks)


def _have_times_moved(found: str, shown: str) -> bool:
    """Return whether a duration in the text differs from the shown one by more than measurements vary."""
    pairs = zip(_list_durations(found), _list_durations(shown), strict=False)
    return any(abs(one - other) > CLOSE_TIMES * other for one, other in pairs)


def _list_durations(text: str) -> list[float]:
    return [float(number) * _SECONDS[unit] for number, unit in re.findall(r"([\d.]+) (µs|ms|s)\b", text)]


def _list_shares(text: str) -> list[float]:
    return [float(percent) / 100 for percent in re.findall(r"([\d.]+) %", text)]

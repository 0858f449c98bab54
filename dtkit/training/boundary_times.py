"""The time between the steps of a run, as engines measured it, for the history.

Engines don't know why they waited. So the notebook takes the time of its callbacks, and of pauses, from their waits. A
wait next to a validation counts as a part of it: the calls for it end a series of steps that would have gone on.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from dtkit.history.between_steps import ALL, CALLBACKS, VALIDATION, WAITING
from dtkit.history.scalars import BETWEEN_PREFIX, ScalarRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history.history import History
    from dtkit.messages import DispatchResult


class BoundaryTimeRecorder:
    """Records the means over all ranks, which wait for each other in each step, as numbers of the first one."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._callbacks_s = 0.0
        self._elapsed_s: float | None = None  # at the end of the last dispatch that this notebook has seen
        self._last_validation_s = 0.0  # which the engines report once more if the run is extended

    def begin_anew(self) -> None:
        """Forget when the last dispatch ended: the elapsed time was set to that of another notebook."""
        self._elapsed_s = None

    def add_callbacks(self, seconds: float) -> None:
        """Note the time for which callbacks ran since the last steps."""
        self._callbacks_s += seconds

    def record_last_validation(self, step: int) -> None:
        """Record the validation after the last step of a run: no later steps come with its time."""
        if (passed_s := self._measure_passed()) is None:
            return
        self._last_validation_s = passed_s
        self._history.add(ScalarRecord(0, {BETWEEN_PREFIX + VALIDATION: [(step, passed_s, 1.0)]}))

    def record(self, step: int, results: Sequence[DispatchResult], *, is_first_of_message: bool = True) -> None:
        """Record the time before `step`, the first one of a dispatch. Pauses are between messages alone."""
        passed_s = self._measure_passed()
        if not is_first_of_message:
            passed_s = math.inf
        callbacks_s, self._callbacks_s = self._callbacks_s, 0.0
        measured = [result.between for result in results if result.between]
        if passed_s is None or not measured or len(measured) < len(results):
            return
        names = {name for part in measured for name in part}
        seconds = {name: statistics.fmean(part.get(name, 0.0) for part in measured) for name in names}
        known_s, self._last_validation_s = self._last_validation_s, 0.0
        all_s = min(max(0.0, seconds.pop(ALL) - known_s), passed_s)  # without pauses
        if known_s:
            seconds.pop(VALIDATION, None)
        waiting_s = max(0.0, all_s - sum(seconds.values()))
        seconds[CALLBACKS] = min(callbacks_s, waiting_s)
        waiting_s -= seconds[CALLBACKS]
        # Without validation, most of these boundaries would not be there.
        seconds[VALIDATION if VALIDATION in seconds else WAITING] = seconds.get(VALIDATION, 0.0) + waiting_s
        numbers = {BETWEEN_PREFIX + name: [(step, part, 1.0)] for name, part in seconds.items() if part > 0}
        if numbers:
            self._history.add(ScalarRecord(0, numbers))

    def _measure_passed(self) -> float | None:
        """Return the seconds since the last call, without pauses; None in the first.

        Before the first, another notebook may have had the run, and no notebook for a while.
        """
        elapsed_s = self._history.position[1]
        before, self._elapsed_s = self._elapsed_s, elapsed_s
        return None if before is None else elapsed_s - before

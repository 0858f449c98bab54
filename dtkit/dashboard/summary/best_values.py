"""The best validation of each metric so far. Views ask for it with each message, so each evaluation is read once."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

from dtkit.history.metric_direction import is_better_lower

if TYPE_CHECKING:
    from dtkit.history.history import History

_read: weakref.WeakKeyDictionary[History, dict[str, _Best]] = weakref.WeakKeyDictionary()


class _Best:
    """Best value of one metric among the first evaluations."""

    def __init__(self) -> None:
        self.num_read, self.value = 0, math.nan


def find_best_value(history: History, name: str) -> float:
    """Return the best value of a metric in the history's evaluations; NaN without one."""
    evaluations = history.evaluations
    best = _read.setdefault(history, {}).setdefault(name, _Best())
    if len(evaluations) < best.num_read:  # some were undone
        best = _read[history][name] = _Best()
    for evaluation in evaluations[max(0, best.num_read - 1) :]:  # the last one may have been replaced
        value = evaluation.values.get(name)
        if value is None or not math.isfinite(value):
            continue
        is_better = value < best.value if is_better_lower(name, history.directions) else value > best.value
        if is_better or math.isnan(best.value):
            best.value = float(value)
    best.num_read = len(evaluations)
    return best.value

"""The best validation of each metric as a mark in the charts of a report, whose cards name its step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dtkit.dashboard.summary.comparison import find_best_evaluation
from dtkit.history.metric_direction import is_better_lower

if TYPE_CHECKING:
    from dtkit.history.history import History


class BestMark(NamedTuple):
    """The step and the value of the best validation, and the card's word for it: "lowest" or "highest"."""

    step: int
    value: float
    word: str


def find_best_mark(history: History, name: str) -> BestMark | None:
    """Return the best validation of a metric; None where it is the only one, which needs no mark."""
    values = [e.values[name] for e in history.evaluations if e.values.get(name) is not None]
    best = find_best_evaluation(history, name)
    if best is None or sum(map(math.isfinite, values)) < 2:
        return None
    return BestMark(*best, "lowest" if is_better_lower(name, history.directions) else "highest")


def list_best_marks(history: History) -> dict[str, BestMark]:
    """Return the mark of each metric that has one."""
    names = dict.fromkeys(name for evaluation in history.evaluations for name in evaluation.values)
    return {name: mark for name in names if (mark := find_best_mark(history, name)) is not None}

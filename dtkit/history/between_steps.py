"""Time between the steps of a run: how much validation, callbacks, saving and waiting for the notebook took.

Engines measure it (`engine/observe/boundary_timer.py`), and the history keeps it like numbers of `dtkit.log`, at the
step that follows. After the last step, only validation has such a number, which the notebook measures. Steps that an
engine took without a notebook have none.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from dtkit.history.remembered import remember_last
from dtkit.history.scalars import BETWEEN_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.history.history import History

ALL = "all"
"""All of the time between two dispatches, as an engine measures it."""
VALIDATION, CALLBACKS, CHECKPOINTS, SNAPSHOTS, WAITING = (
    "validation",
    "callbacks",
    "checkpoints",
    "snapshots",
    "waiting",
)
"""Parts of this time. Validation is with the calls for it, and "waiting" is what no other part covers."""
KINDS = (VALIDATION, CALLBACKS, CHECKPOINTS, SNAPSHOTS, WAITING)


class TimeBetween(NamedTuple):
    """Seconds of a run in its steps but the first, and between them by kind."""

    steps_s: float
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Seconds between the steps."""
        return sum(self.seconds.values())

    @property
    def whole_s(self) -> float:
        """Seconds in the steps and between them, as a clock on the wall shows them."""
        return self.steps_s + self.total_s

    def share(self, kind: str) -> float:
        """Return the share of the whole time that one kind takes."""
        return self.seconds[kind] / self.whole_s if self.whole_s > 0 else 0.0

    @property
    def total_share(self) -> float:
        """Share of the whole time that is between the steps."""
        return self.total_s / self.whole_s if self.whole_s > 0 else 0.0


@remember_last
def read_time_between(history: History) -> TimeBetween:
    """Return the time of a run in its steps but the first, and between them."""
    return TimeBetween(_sum_step_seconds(history), {kind: _sum_seconds(history, kind) for kind in KINDS})


def sum_time_since(history: History, num_steps: int) -> float:
    """Return the seconds in all steps after the first `num_steps`, undone ones too, and between them."""
    totals = history.read_totals(num_steps)
    if not len(totals):
        return 0.0
    between_s = sum(_sum_seconds(history, kind, since=int(totals["step"][0])) for kind in KINDS)
    return float(totals["step_s"].sum()) + between_s


class _StepSeconds:
    """Seconds in the steps of a history but the first. Each look reads new steps alone, since a run may have many."""

    def __init__(self) -> None:
        self.sum_s, self._num_read, self._num_returns = 0.0, 1, 0

    def update(self, history: History) -> None:
        """Add the new steps."""
        num_returns = len(history.returns)
        if num_returns != self._num_returns:  # steps that were added may have been undone
            self.sum_s, self._num_read, self._num_returns = 0.0, 1, num_returns
        seconds = history.totals(self._num_read)["step_s"]
        self._num_read += len(seconds)
        self.sum_s += float(seconds.sum(dtype="f8"))


def _sum_step_seconds(history: History) -> float:
    with _lock:
        seconds = _step_seconds.setdefault(history, _StepSeconds())
        seconds.update(history)
        return seconds.sum_s


# locks: while a view or the run reads new steps
_lock = threading.Lock()
_step_seconds: weakref.WeakKeyDictionary[History, _StepSeconds] = weakref.WeakKeyDictionary()


def _sum_seconds(history: History, kind: str, *, since: int = 0) -> float:
    name = BETWEEN_PREFIX + kind
    return float(history.scalar(name, since=since)[1].sum()) if history.count_scalar_records(name) else 0.0

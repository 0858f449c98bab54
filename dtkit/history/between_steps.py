"""Time between the steps of a run: how much validation, callbacks, saving and waiting for the notebook took.

Engines measure it (`engine/observe/boundary_timer.py`), and the history keeps it like numbers of `dtkit.log`, at the
step that follows. After the last step, only validation has such a number, which the notebook measures. Steps that an
engine took without a notebook have none.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
_MAX_UNSETTLED_STEPS = 200  # a rank reports within a few steps of the others


class TimeBetween(NamedTuple):
    """Seconds of a run in its steps but the first, and between them by kind."""

    steps_s: float
    seconds: Mapping[str, float]
    first_validations_s: float = 0.0
    """Seconds of the first validation, and of the first after each repair, which may load modules, or compile."""

    def leave_out_warm_up(self) -> TimeBetween:
        """Return the times without these first validations, as they are without the first step."""
        later = self.seconds[VALIDATION] - self.first_validations_s
        return self._replace(seconds={**self.seconds, VALIDATION: max(0.0, later)}, first_validations_s=0.0)

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
    with _lock:
        sums = _sums.setdefault(history, _Sums())
        sums.update(history)
        seconds = {kind: of_kind.sum_s for kind, of_kind in sums.kinds.items()}
        return TimeBetween(sums.steps_s, seconds, sums.kinds[VALIDATION].sum_firsts())


def sum_time_since(history: History, num_steps: int) -> float:
    """Return the seconds in all steps after the first `num_steps`, undone ones too, and between them."""
    totals = history.read_totals(num_steps)
    if not len(totals):
        return 0.0
    names = [name for name in map(BETWEEN_PREFIX.__add__, KINDS) if history.count_scalar_records(name)]
    between_s = sum(float(history.scalar(name, since=int(totals["step"][0]))[1].sum()) for name in names)
    return float(totals["step_s"].sum()) + between_s


class _Sums:
    """Seconds of a history so far. Each look reads what is new alone, since a run may have many steps."""

    def __init__(self) -> None:
        self._clear(0)

    def _clear(self, num_returns: int) -> None:
        self.steps_s, self._num_read, self._num_returns = 0.0, 1, num_returns
        self.kinds = {kind: _KindSum(BETWEEN_PREFIX + kind) for kind in KINDS}

    def update(self, history: History) -> None:
        """Add the new steps, and the times before them."""
        num_returns = len(history.returns)
        if num_returns != self._num_returns:  # steps that were added may have been undone
            self._clear(num_returns)
        seconds = history.read_valid_totals(self._num_read)["step_s"]
        self._num_read += len(seconds)
        self.steps_s += float(seconds.sum(dtype="f8"))
        for kind in self.kinds.values():
            kind.update(history)


class _KindSum:
    """Seconds of one kind: the sum up to a step, after which ranks may still report, and that of the later ones."""

    def __init__(self, name: str) -> None:
        self.sum_s = 0.0
        self._name = name
        self._firsts: dict[int, float] = {}  # step -> seconds
        self._settled_s, self._num_records, self._since = 0.0, 0, 0

    def update(self, history: History) -> None:
        """Add the steps that are new."""
        num_records = history.count_scalar_records(self._name)
        if num_records == self._num_records:
            return
        self._num_records = num_records
        steps, seconds = history.scalar(self._name, since=self._since)
        self.sum_s = self._settled_s + float(seconds.sum())
        for start in _list_engine_starts(history):
            index = int(np.searchsorted(steps, start))
            if start >= self._since and index < len(steps):
                self._firsts[int(steps[index])] = float(seconds[index])
        if len(steps) > _MAX_UNSETTLED_STEPS:
            count = len(steps) - _MAX_UNSETTLED_STEPS // 2
            self._settled_s += float(seconds[:count].sum())
            self._since = int(steps[count])

    def sum_firsts(self) -> float:
        """Return the seconds of the first ones after each start of engines."""
        return sum(self._firsts.values())


def _list_engine_starts(history: History) -> list[int]:
    """Return the steps from which a run went on with new engines: its first, that of a checkpoint, and of repairs."""
    first_own = history.num_inherited_events
    resumed = history.events[first_own : first_own + 1] if first_own else []
    repairs = [event for event in history.events if event.kind == "repair"]
    return [0, *(event.step for event in [*resumed, *repairs])]


# locks: while a view or the run reads new steps
_lock = threading.Lock()
_sums: weakref.WeakKeyDictionary[History, _Sums] = weakref.WeakKeyDictionary()

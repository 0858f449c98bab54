"""Time between the steps of a run: how much validation, callbacks, saving and waiting for the notebook took.

Engines measure it (`engine/observe/boundary_timer.py`), and the history keeps it like numbers of `dtkit.log`, at the
step that follows. After the last step, only validation has such a number, which the notebook measures. Steps that an
engine took without a notebook have none.
"""

from __future__ import annotations

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
    steps_s = float(history.totals(1)["step_s"].sum(dtype="f8"))
    return TimeBetween(steps_s, {kind: _sum_seconds(history, kind) for kind in KINDS})


def _sum_seconds(history: History, kind: str) -> float:
    name = BETWEEN_PREFIX + kind
    return float(history.scalar(name)[1].sum()) if history.count_scalar_records(name) else 0.0

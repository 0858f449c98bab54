"""A new learning rate, requested by the user.

It is sent with a dispatch, and takes effect on all ranks at the dispatch's first step. It is sent again if the dispatch
is cancelled, or if the ranks go back to an earlier state.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import TYPE_CHECKING, Any

from dtkit._util.stacklevel import find_caller_stacklevel
from dtkit.history.rate_jump import describe_rate_jump
from dtkit.training.progress import resolve

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dtkit.history.history import History


@dataclasses.dataclass(frozen=True)
class LearningRateChange:
    """A new learning rate, and the futures that will return the step at which it took effect."""

    value: float
    answers: list[Future[int]]


class LearningRateUpdater:
    """The learning rate to send with the next dispatch, and the one in effect."""

    def __init__(self) -> None:
        self._pending: LearningRateChange | None = None
        self._in_effect: tuple[int, float] | None = None

    @property
    def has_pending(self) -> bool:
        """Whether a change waits to be sent."""
        return self._pending is not None

    def request(self, value: float, answer: Future[int] | None) -> None:
        """Request a change. It replaces one that was not sent yet, whose callers then wait for the new one."""
        waiting = self._pending.answers if self._pending else []
        self._pending = LearningRateChange(value, waiting if answer is None else [*waiting, answer])

    def take_pending(self) -> LearningRateChange | None:
        """Return the change to send with this dispatch."""
        change, self._pending = self._pending, None
        return change

    def on_result(self, change: LearningRateChange | None, step: int) -> None:
        """Note that all ranks use it from this step on."""
        if change is not None:
            self._in_effect = step, change.value
            for answer in change.answers:
                resolve(answer, step)

    def on_cancel(self, change: LearningRateChange | None, sent_step: int, current_step: int) -> None:
        """Note that the dispatch from `sent_step` on was cancelled: send its change again.

        It is not sent again if ranks are beyond that step, which they reached with the change. Nor is it if a newer
        change was requested.
        """
        if change is None or current_step > sent_step:
            self.on_result(change, sent_step)
        elif self._pending is None:
            self._pending = change
        else:
            self._pending.answers.extend(change.answers)

    def reset_to(self, step: int) -> None:
        """Note that all ranks have the state of this step. A change after it is sent again."""
        if self._in_effect is not None and step <= self._in_effect[0] and self._pending is None:
            self._pending = LearningRateChange(self._in_effect[1], [])

    def answer_pending(self, step: int) -> None:
        """Answer the callers of an unsent change with the run's step."""
        for answer in self._pending.answers if self._pending else ():
            resolve(answer, step)
        if self._pending is not None:
            self._pending.answers.clear()


def warn_of_jump(history: History, current: float | None, lr: float) -> None:
    """Warn of a rate that is far from the last one that was not 0, so maybe mistyped."""
    jump = describe_rate_jump(history, current, lr)
    if jump:
        warnings.warn(
            f"lr={lr:.6g} is {jump}. If that is a mistake, set the rate again, such as run.set(lr=0.01)",
            stacklevel=find_caller_stacklevel(),
        )


def parse_lr(lr: Any) -> float:
    """Parse a user's learning rate. Raises ValueError unless it is a finite number from 0 up."""
    try:
        value = float(lr)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"lr={lr!r}; a learning rate is a finite number from 0 up, such as 0.01")
    return value

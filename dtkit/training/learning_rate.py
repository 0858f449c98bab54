"""The learning rate that somebody asked a run for.

It travels with a dispatch, and holds on all ranks from that one's first step on. A dispatch may come to nothing, and
ranks may go back to a state that is older than it: then it is sent again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.training.pending_call import resolve

if TYPE_CHECKING:
    from concurrent.futures import Future


@dataclasses.dataclass(frozen=True)
class LearningRateChange:
    """One, and who waits to hear at which step it took effect."""

    value: float
    answers: list[Future[int]]


class LearningRateUpdater:
    """What is to be sent with the next dispatch, and what holds since when."""

    def __init__(self) -> None:
        self._pending: LearningRateChange | None = None
        self._in_effect: tuple[int, float] | None = None

    @property
    def has_pending(self) -> bool:
        """Whether one is still to be sent."""
        return self._pending is not None

    def request(self, value: float, answer: Future[int] | None) -> None:
        """Have this one, in place of any other that was not sent yet; who waits for that hears of this one."""
        waiting = self._pending.answers if self._pending else []
        self._pending = LearningRateChange(value, waiting if answer is None else [*waiting, answer])

    def take_pending(self) -> LearningRateChange | None:
        """What the dispatch that is sent now begins with."""
        taken, self._pending = self._pending, None
        return taken

    def on_result(self, change: LearningRateChange | None, step: int) -> None:
        """All ranks have had it from this step on."""
        if change is not None:
            self._in_effect = step, change.value
            for answer in change.answers:
                resolve(answer, step)

    def on_cancel(self, change: LearningRateChange | None, sent_step: int, current_step: int) -> None:
        """The dispatch from step `sent` on came to nothing; unless ranks `query_positions` beyond that, so did the rate.

        Then it is wanted again, unless another one was asked for meanwhile.
        """
        if change is None or current_step > sent_step:
            self.on_result(change, sent_step)
        elif self._pending is None:
            self._pending = change
        else:
            self._pending.answers.extend(change.answers)

    def reset_to(self, step: int) -> None:
        """All ranks have the state that they had at this step: one that came later is lost with what it did."""
        if self._in_effect is not None and step <= self._in_effect[0] and self._pending is None:
            self._pending = LearningRateChange(self._in_effect[1], [])

    def answer_pending(self, step: int) -> None:
        """Tell those who wait for one that was not sent where the run stands now."""
        for answer in self._pending.answers if self._pending else ():
            resolve(answer, step)
        if self._pending is not None:
            self._pending.answers.clear()

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
class Rate:
    """One, and who waits to hear at which step it took effect."""

    value: float
    answers: list[Future[int]]


class LearningRate:
    """What is to be sent with the next dispatch, and what holds since when."""

    def __init__(self) -> None:
        self._wanted: Rate | None = None
        self._since: tuple[int, float] | None = None

    @property
    def wanted(self) -> bool:
        """Whether one is still to be sent."""
        return self._wanted is not None

    def want(self, value: float, answer: Future[int] | None) -> None:
        """Have this one, in place of any other that was not sent yet; who waits for that hears of this one."""
        waiting = self._wanted.answers if self._wanted else []
        self._wanted = Rate(value, waiting if answer is None else [*waiting, answer])

    def take(self) -> Rate | None:
        """What the dispatch that is sent now begins with."""
        taken, self._wanted = self._wanted, None
        return taken

    def landed(self, rate: Rate | None, step: int) -> None:
        """All ranks have had it from this step on."""
        if rate is not None:
            self._since = step, rate.value
            for answer in rate.answers:
                resolve(answer, step)

    def withdrawn(self, rate: Rate | None, sent: int, stands: int) -> None:
        """The dispatch from step `sent` on came to nothing; unless ranks `stand` beyond that, so did the rate.

        Then it is wanted again, unless another one was asked for meanwhile.
        """
        if rate is None or stands > sent:
            self.landed(rate, sent)
        elif self._wanted is None:
            self._wanted = rate
        else:
            self._wanted.answers.extend(rate.answers)

    def back_at(self, step: int) -> None:
        """All ranks have the state that they had at this step: one that came later is lost with what it did."""
        if self._since is not None and step <= self._since[0] and self._wanted is None:
            self._wanted = Rate(self._since[1], [])

    def answer(self, step: int) -> None:
        """Tell those who wait for one that was not sent where the run stands now."""
        for answer in self._wanted.answers if self._wanted else ():
            resolve(answer, step)
        if self._wanted is not None:
            self._wanted.answers.clear()

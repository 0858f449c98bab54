"""Where a step's time goes: a mark at each border between its phases, read once the dispatch has ended.

A step runs through "data", "forward", "backward", "sync" and "update", in any order and as often as it likes: whoever
does the work says what begins. A pipeline also says which micro-batch of which stage, tells the halves of backward
apart ("backward input", "backward weight"), and has a phase for each message to and from other stages
(:data:`dtkit.messages.PHASES`); "other" is what is between these. Marking costs a clock's reading and a list's append,
so that measuring is never the reason why a step is slow.

"sync" is time blocked in a collective. How much of that and of messages was waiting for others can only be told from
all ranks' marks (see :mod:`dtkit.waiting` and :mod:`dtkit.messages`), so those are kept as times and not only as
durations.

A rank can be slowed on purpose, for lessons: it then sleeps after each piece of computing, in proportion to it.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from dtkit.messages import MESSAGE, PHASES
from dtkit.timeline import SPAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.engine.probe import Clock

COMPUTING = ("forward", "backward", "backward input", "backward weight")
BETWEEN, END = "other", "end"
_MESSAGES = {phase: number for number, phase in enumerate(PHASES)}

Marks = list[tuple[str, object, tuple[int, int] | None]]
"""(phase, mark at which it began, (stage, micro-batch) or None) in order, closed by an "end"."""


class Phases:
    """The marks of one job's steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.slowness = 1.0
        """How many times longer this rank's computing takes, by sleeping: 1 for not at all."""
        self._marks: Marks = []
        self._around = ""  # the phase in whose midst a collective runs

    def enter(self, phase: str, where: tuple[int, int] | None = None) -> None:
        """The phase that ran so far ends here and `phase` begins, in a pipeline for (stage, micro-batch)."""
        if self.slowness > 1 and self._marks and self._marks[-1][0] in COMPUTING:
            self._drag(self._marks[-1][1])
        self._marks.append((phase, self.clock.mark(), where))

    def keep(self, phase: str, where: tuple[int, int]) -> None:
        """`phase` goes on where it runs already, else it begins."""
        if not self._marks or self._marks[-1][0] != phase or self._marks[-1][2] != where:
            self.enter(phase, where)

    def block(self) -> None:
        """A collective begins in the midst of a phase. Between steps (in an evaluation) nothing is marked."""
        if self._marks and not self._around:
            self._around = self.now
            self.enter("sync")

    def unblock(self) -> None:
        """It has ended, and the phase around it goes on."""
        if self._around:
            phase, self._around = self._around, ""
            self.enter(phase)

    @property
    def around(self) -> str:
        """The phase that runs; during a collective in the midst of one, that one."""
        return self._around or self.now

    @property
    def now(self) -> str:
        """The phase that runs; empty between steps."""
        return self._marks[-1][0] if self._marks else ""

    def seen(self) -> tuple[str, int]:
        """(the phase that runs, marks of this step so far) for another thread; ("", 0) between steps."""
        marks = self._marks  # read once: the step may end meanwhile
        return (marks[-1][0], len(marks)) if marks else ("", 0)

    def _drag(self, since: object) -> None:
        now = self.clock.mark()
        self.clock.settle()
        time.sleep((self.slowness - 1) * self.clock.seconds(since, now))

    def finish(self) -> Marks:
        """End the step; its marks."""
        self.enter(END)
        marks, self._marks = self._marks, []
        return marks

    def abandon(self) -> None:
        """Forget a step that failed."""
        self._marks, self._around = [], ""


def durations(marks: Marks, clock: Clock) -> dict[str, float]:
    """Seconds in each phase of one step, and in all of them as "step"."""
    found: dict[str, float] = {}
    for (phase, begun, _), (_, ended, _) in itertools.pairwise(marks):
        found[phase] = found.get(phase, 0.0) + clock.seconds(begun, ended)
    found["step"] = clock.seconds(marks[0][1], marks[-1][1])
    return found


def spans(steps: Sequence[tuple[int, Marks]], rank: int, clock: Clock) -> np.ndarray:
    """What a rank did when in these (step, marks): rows of dtype :data:`dtkit.timeline.SPAN`; none of BETWEEN."""
    rows = [
        (step, rank, phase, *(where or (-1, -1)), clock.at(begun), clock.at(ended))
        for step, marks in steps
        for (phase, begun, where), (_, ended, _) in itertools.pairwise(marks)
        if phase != BETWEEN
    ]
    return np.array(rows, SPAN)


def messages(steps: Sequence[tuple[int, Marks]], clock: Clock) -> np.ndarray:
    """What these (step, marks) tell of messages: rows of dtype :data:`dtkit.messages.MESSAGE`."""
    rows = [
        (step, _MESSAGES[phase], *where, clock.at(begun), clock.at(ended))
        for step, marks in steps
        for (phase, begun, where), (_, ended, _) in itertools.pairwise(marks)
        if where is not None and phase in _MESSAGES
    ]
    return np.array(rows, MESSAGE)


def blocked(steps: Sequence[Marks], clock: Clock) -> np.ndarray:
    """When each step was blocked in collectives: (steps, most such times in a step, 2) of begin and end, else NaN.

    Times are the clock's, in seconds, as in `time.perf_counter`: common to all processes of one host.
    """
    spans = [[(a, b) for (phase, a, _), (_, b, _) in itertools.pairwise(m) if phase == "sync"] for m in steps]
    found = np.full((len(steps), max(map(len, spans), default=0), 2), np.nan)
    for step, pairs in zip(found, spans, strict=True):
        for place, (begun, ended) in zip(step, pairs, strict=False):
            place[:] = clock.at(begun), clock.at(ended)
    return found

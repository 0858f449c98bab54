"""Where a step's time goes: a mark at each border between its phases, read once the dispatch has ended.

A step runs through "data", "forward", "backward", "sync" and "update", in any order and as often as it likes: whoever
does the work says what begins. A pipeline also says which micro-batch of which stage, tells the halves of backward
apart ("backward input", "backward weight"), and has a phase for each message to and from other stages
(:data:`dtkit.history.message_times.MESSAGE_PHASES`); "other" is what is between these. Marking costs a clock's reading
and a list's append, so that measuring is never the reason why a step is slow.

"sync" is time blocked in a collective: among all ranks, unless it is said among which. How much of that and of
messages was waiting for others can only be told from all ranks' marks (see :mod:`dtkit.history.comm_time` and
:mod:`dtkit.history.message_times`), so those are kept as times and not only as durations.

A rank can be slowed on purpose, for lessons: it then sleeps after each piece of computing, in proportion to it. Where
layers are cut there are many short pieces, and each sleep lasts longer than asked for; that is taken off the next ones.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from dtkit.history.message_times import MESSAGE_DTYPE, MESSAGE_PHASES, SYNC_PHASE
from dtkit.history.timeline import SPAN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.engine.node_info import Clock

COMPUTING = ("forward", "backward", "backward input", "backward weight")
BETWEEN, END = "other", "end"
_MOST_RANKS = 2**20
_MESSAGES = {phase: number for number, phase in enumerate(MESSAGE_PHASES)}

Marks = list[tuple[str, object, tuple[int, int] | None]]
"""(phase, mark at which it began, where or None) in order, closed by an "end".

Where is (stage, micro-batch) in a pipeline, and (first rank, last rank) of a collective among fewer than all.
"""


class Phases:
    """The marks of one job's steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.slowness = 1.0
        """How many times longer this rank's computing takes, by sleeping: 1 for not at all."""
        self._late_until: object | None = None  # what was computed before in this phase was slowed
        self._owed = 0.0  # seconds to sleep yet; below zero, what was slept too much
        self._marks: Marks = []
        self._around = ""  # the phase in whose midst a collective runs

    def enter(self, phase: str, where: tuple[int, int] | None = None) -> None:
        """The phase that ran so far ends here and `phase` begins, in a pipeline for (stage, micro-batch)."""
        self.catch_up()
        self._late_until = None
        self._marks.append((phase, self.clock.mark(), where))

    def keep(self, phase: str, where: tuple[int, int]) -> None:
        """`phase` goes on where it runs already, else it begins."""
        if not self._marks or self._marks[-1][0] != phase or self._marks[-1][2] != where:
            self.enter(phase, where)

    def block(self, among: tuple[int, int] | None = None) -> None:
        """A collective begins in the midst of a phase, among ranks from one to another, or all of them.

        Between steps (in an evaluation) nothing is marked.
        """
        if self._marks and not self._around and self._marks[-1][0] != SYNC_PHASE:
            self._around = self._marks[-1][0]
            self.enter(SYNC_PHASE, among)

    def unblock(self) -> None:
        """It has ended, and the phase around it goes on."""
        if self._around:
            phase, self._around = self._around, ""
            self.enter(phase)

    def catch_up(self) -> None:
        """Be as late as a slowed rank is, without ending the phase: others go on at what it does next."""
        if self.slowness > 1 and self._marks and self._marks[-1][0] in COMPUTING:
            self._drag(self._marks[-1][1] if self._late_until is None else self._late_until)
            self._late_until = self.clock.mark()

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
        self._owed += (self.slowness - 1) * self.clock.seconds(since, now)
        if self._owed > 0:
            self._owed -= _slept(self._owed)

    def finish(self) -> Marks:
        """End the step; its marks."""
        self.enter(END)
        marks, self._marks = self._marks, []
        return marks

    def abandon(self) -> None:
        """Forget a step that failed."""
        self._marks, self._around, self._late_until, self._owed = [], "", None, 0.0


def _slept(seconds: float) -> float:
    """Sleep so long; how long it took."""
    begun = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begun


def durations(marks: Marks, clock: Clock) -> dict[str, float]:
    """Seconds in each phase of one step, and in all of them as "step"."""
    found: dict[str, float] = {}
    for (phase, begun, _), (_, ended, _) in itertools.pairwise(marks):
        found[phase] = found.get(phase, 0.0) + clock.seconds(begun, ended)
    found["step"] = clock.seconds(marks[0][1], marks[-1][1])
    return found


def spans(steps: Sequence[tuple[int, Marks]], rank: int, clock: Clock) -> np.ndarray:
    """Rows of dtype :data:`dtkit.history.timeline.SPAN_DTYPE`: when a rank did what in these (step, marks)."""
    rows = [
        (step, rank, *_told(phase, where), clock.at(begun), clock.at(ended))
        for step, marks in steps
        for (phase, begun, where), (_, ended, _) in itertools.pairwise(marks)
        if phase != BETWEEN
    ]
    return np.array(rows, SPAN_DTYPE)


def _told(phase: str, where: tuple[int, int] | None) -> tuple[str, int, int]:
    """(phase, stage, micro-batch) of a span."""
    if where is None:
        return phase, -1, -1
    return (f"{phase} {where[0]}-{where[1]}", -1, -1) if phase == SYNC_PHASE else (phase, *where)


def messages(steps: Sequence[tuple[int, Marks]], clock: Clock) -> np.ndarray:
    """What these (step, marks) tell of messages: rows of dtype :data:`dtkit.history.message_times.MESSAGE_DTYPE`."""
    rows = [
        (step, _MESSAGES[phase], *where, clock.at(begun), clock.at(ended))
        for step, marks in steps
        for (phase, begun, where), (_, ended, _) in itertools.pairwise(marks)
        if where is not None and phase in _MESSAGES
    ]
    return np.array(rows, MESSAGE_DTYPE)


def blocked(steps: Sequence[Marks], clock: Clock) -> np.ndarray:
    """When each step was blocked in collectives: (steps, most such times in a step, 3) of begin, end and among whom.

    Times are the clock's, in seconds, as in `time.perf_counter`: common to all processes of one host. Among whom is a
    number that all ranks of a collective give, and no rank for other ranks; what is not used is NaN.
    """
    found = [list(_blocked(marks, clock)) for marks in steps]
    places = max(map(len, found), default=0)
    unused = [(np.nan, np.nan, np.nan)]
    return np.array([own + unused * (places - len(own)) for own in found], float).reshape(len(steps), places, 3)


def _blocked(marks: Marks, clock: Clock) -> Iterator[tuple[float, float, float]]:
    for (phase, begun, among), (_, ended, _) in itertools.pairwise(marks):
        if phase == SYNC_PHASE:
            number = -1 if among is None else among[0] * _MOST_RANKS + among[1]
            yield clock.at(begun), clock.at(ended), number

"""Where a step's time goes: a mark at each border between its phases, read once the dispatch has ended.

A step runs through "data", "forward", "backward", "sync" and "update", in any order and as often as it likes: whoever
does the work says what begins. A pipeline also says which micro-batch of which stage, tells the halves of backward
apart ("backward input", "backward weight"), and has a phase for each message to and from other stages
(:data:`dtkit.history.comm_time.MESSAGE_PHASES`); "other" is what is between these. Marking costs a clock's reading
and a list's append, so that measuring is never the reason why a step is slow.

"sync" is time blocked in a collective: among all ranks, unless it is said among which. How much of that and of
messages was waiting for others can only be told from all ranks' marks (see
:mod:`dtkit.history.comm_time`), so those are kept as times and not only as durations.

A rank can be slowed on purpose, for lessons: it then sleeps after each piece of computing, in proportion to it. Where
layers are cut there are many short pieces, and each sleep lasts longer than asked for; that is taken off the next ones.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from dtkit.history.comm_time import MESSAGE_DTYPE, MESSAGE_PHASES, SYNC_PHASE
from dtkit.history.timeline import SPAN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.engine.node_info import Clock

COMPUTE_PHASES = ("forward", "backward", "backward input", "backward weight")
BETWEEN_PHASES, END_OF_STEP = "other", "end"
_MAX_RANKS = 2**20
_MESSAGE_PHASE_NUMBERS = {phase: number for number, phase in enumerate(MESSAGE_PHASES)}

PhaseEvents = list[tuple[str, object, tuple[int, int] | None]]
"""(phase, mark at which it began, where or None) in order, closed by an "end".

Where is (stage, micro-batch) in a pipeline, and (first rank, last rank) of a collective among fewer than all.
"""


class PhaseTimer:
    """The marks of one job's steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.delay_factor = 1.0
        """How many times longer this rank's computing takes, by sleeping: 1 for not at all."""
        self._delayed_until: object | None = None  # what was computed before in this phase was slowed
        self._delay_owed_s = 0.0  # seconds to sleep yet; below zero, what was slept too much
        self._events: PhaseEvents = []
        self._enclosing_phase = ""  # the phase in whose midst a collective runs

    def enter(self, phase: str, position: tuple[int, int] | None = None) -> None:
        """The phase that ran so far ends here and `phase` begins, in a pipeline for (stage, micro-batch)."""
        self.apply_delay()
        self._delayed_until = None
        self._events.append((phase, self.clock.record_mark(), position))

    def continue_phase(self, phase: str, position: tuple[int, int]) -> None:
        """`phase` goes on where it runs already, else it begins."""
        if not self._events or self._events[-1][0] != phase or self._events[-1][2] != position:
            self.enter(phase, position)

    def begin_collective(self, rank_span: tuple[int, int] | None = None) -> None:
        """A collective begins in the midst of a phase, among ranks from one to another, or all of them.

        Between steps (in an evaluation) nothing is marked.
        """
        if self._events and not self._enclosing_phase and self._events[-1][0] != SYNC_PHASE:
            self._enclosing_phase = self._events[-1][0]
            self.enter(SYNC_PHASE, rank_span)

    def end_collective(self) -> None:
        """It has ended, and the phase around it goes on."""
        if self._enclosing_phase:
            phase, self._enclosing_phase = self._enclosing_phase, ""
            self.enter(phase)

    def apply_delay(self) -> None:
        """Be as late as a slowed rank is, without ending the phase: others go on at what it does next."""
        if self.delay_factor > 1 and self._events and self._events[-1][0] in COMPUTE_PHASES:
            self._sleep_for_delay(self._events[-1][1] if self._delayed_until is None else self._delayed_until)
            self._delayed_until = self.clock.record_mark()

    @property
    def enclosing_phase(self) -> str:
        """The phase that runs; during a collective in the midst of one, that one."""
        return self._enclosing_phase or self.current_phase

    @property
    def current_phase(self) -> str:
        """The phase that runs; empty between steps."""
        return self._events[-1][0] if self._events else ""

    def get_progress(self) -> tuple[str, int]:
        """(the phase that runs, marks of this step so far) for another thread; ("", 0) between steps."""
        marks = self._events  # read once: the step may end meanwhile
        return (marks[-1][0], len(marks)) if marks else ("", 0)

    def _sleep_for_delay(self, since: object) -> None:
        now = self.clock.record_mark()
        self.clock.synchronize()
        self._delay_owed_s += (self.delay_factor - 1) * self.clock.compute_elapsed(since, now)
        if self._delay_owed_s > 0:
            self._delay_owed_s -= _sleep_measured(self._delay_owed_s)

    def end_step(self) -> PhaseEvents:
        """End the step; its marks."""
        self.enter(END_OF_STEP)
        marks, self._events = self._events, []
        return marks

    def reset(self) -> None:
        """Forget a step that failed."""
        self._events, self._enclosing_phase, self._delayed_until, self._delay_owed_s = [], "", None, 0.0


def _sleep_measured(seconds: float) -> float:
    """Sleep so long; how long it took."""
    begun = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begun


def compute_durations(events: PhaseEvents, clock: Clock) -> dict[str, float]:
    """Seconds in each phase of one step, and in all of them as "step"."""
    found: dict[str, float] = {}
    for (phase, begun, _), (_, ended, _) in itertools.pairwise(events):
        found[phase] = found.get(phase, 0.0) + clock.compute_elapsed(begun, ended)
    found["step"] = clock.compute_elapsed(events[0][1], events[-1][1])
    return found


def build_spans(steps: Sequence[tuple[int, PhaseEvents]], rank: int, clock: Clock) -> np.ndarray:
    """Rows of dtype :data:`dtkit.history.timeline.SPAN_DTYPE`: when a rank did what in these (step, marks)."""
    rows = [
        (step, rank, *_describe_span(phase, where), clock.read_mark(begun), clock.read_mark(ended))
        for step, marks in steps
        for (phase, begun, where), (_, ended, _) in itertools.pairwise(marks)
        if phase != BETWEEN_PHASES
    ]
    return np.array(rows, SPAN_DTYPE)


def _describe_span(phase: str, position: tuple[int, int] | None) -> tuple[str, int, int]:
    """(phase, stage, micro-batch) of a span."""
    if position is None:
        return phase, -1, -1
    return (f"{phase} {position[0]}-{position[1]}", -1, -1) if phase == SYNC_PHASE else (phase, *position)


def build_messages(steps: Sequence[tuple[int, PhaseEvents]], clock: Clock) -> np.ndarray:
    """What these (step, marks) tell of messages: rows of dtype :data:`dtkit.history.comm_time.MESSAGE_DTYPE`."""
    rows = [
        (step, _MESSAGE_PHASE_NUMBERS[phase], *where, clock.read_mark(begun), clock.read_mark(ended))
        for step, marks in steps
        for (phase, begun, where), (_, ended, _) in itertools.pairwise(marks)
        if where is not None and phase in _MESSAGE_PHASE_NUMBERS
    ]
    return np.array(rows, MESSAGE_DTYPE)


def build_blocked_times(steps: Sequence[PhaseEvents], clock: Clock) -> np.ndarray:
    """When each step was blocked in collectives: (steps, most such times in a step, 3) of begin, end and among whom.

    Times are the clock's, in seconds, as in `time.perf_counter`: common to all processes of one host. Among whom is a
    number that all ranks of a collective give, and no rank for other ranks; what is not used is NaN.
    """
    found = [list(_iterate_blocked_times(marks, clock)) for marks in steps]
    places = max(map(len, found), default=0)
    unused = [(np.nan, np.nan, np.nan)]
    return np.array([own + unused * (places - len(own)) for own in found], float).reshape(len(steps), places, 3)


def _iterate_blocked_times(events: PhaseEvents, clock: Clock) -> Iterator[tuple[float, float, float]]:
    for (phase, begun, among), (_, ended, _) in itertools.pairwise(events):
        if phase == SYNC_PHASE:
            number = -1 if among is None else among[0] * _MAX_RANKS + among[1]
            yield clock.read_mark(begun), clock.read_mark(ended), number

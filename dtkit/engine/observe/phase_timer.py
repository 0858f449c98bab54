"""Phases of a step: a mark at the beginning of each, which is read after the dispatch.

A step has the phases "data", "forward", "backward", "sync" and "update", in any order and number. The worker enters
each. A pipeline adds the stage and the micro-batch, and splits backward into "backward input" and "backward weight".
It also has phases for messages between stages (:data:`dtkit.history.comm_time.MESSAGE_PHASES`). "other" is the time
between these. A mark is one clock reading and one list append, so that it doesn't slow a step.

"sync" is the time blocked in a collective, among all ranks unless the event names some. Only the marks of all ranks
show which part of it was waiting (see :mod:`dtkit.history.comm_time`). So these are kept as times, not as durations.

A rank can be slowed on purpose. It then sleeps after each computation, in proportion to its length. Sleeps last longer
than requested, so the excess is subtracted from later ones.
"""

from __future__ import annotations

import collections
import itertools
import operator
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dtkit.history.comm_time import MESSAGE_DTYPE, MESSAGE_PHASES, SYNC_PHASE
from dtkit.history.timeline import SPAN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.observe.clock import Clock

COMPUTE_PHASES = ("forward", "backward", "backward input", "backward weight")
BETWEEN_PHASES, END_OF_STEP = "other", "end"
_MAX_RANKS = 2**20
_MESSAGE_PHASE_NUMBERS = {phase: number for number, phase in enumerate(MESSAGE_PHASES)}

PhaseEvents = list[tuple[str, object, tuple[int, int] | None]]
"""Events (phase, mark of its beginning, position or None) in order; the last one is "end".

A position is (stage, micro-batch) in a pipeline, and (first rank, last rank) for a collective among some ranks.
"""


class PhaseTimer:
    """Recorder of the phases of one job's steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.delay_factor = 1.0
        """Factor by which sleeps lengthen this rank's computation; 1 for none."""
        self.on_phase: Callable[[str], None] | None = None
        """Function that is called with each phase that begins, and with "" at the end of a step."""
        self._delayed_until: object | None = None  # mark in this phase up to which the delay is applied
        self._delay_owed_s = 0.0  # negative after a sleep that was too long
        self._events: PhaseEvents = []
        self._enclosing_phase = ""  # the phase during which a collective runs

    def enter(self, phase: str, position: tuple[int, int] | None = None) -> None:
        """End the current phase and begin `phase`, in a pipeline for the position (stage, micro-batch)."""
        if self.delay_factor > 1:
            self.apply_delay()
            self._delayed_until = None
        self._events.append((phase, self.clock.record_mark(), position))
        if self.on_phase is not None:
            self.on_phase(phase if phase != END_OF_STEP else "")

    def continue_phase(self, phase: str, position: tuple[int, int]) -> None:
        """Begin `phase` unless it is the current one."""
        if not self._events or self._events[-1][0] != phase or self._events[-1][2] != position:
            self.enter(phase, position)

    def begin_collective(self, rank_span: tuple[int, int] | None = None) -> None:
        """Begin a collective within a phase, among the ranks of a span or all ranks.

        Outside of steps, such as in an evaluation, nothing is recorded.
        """
        if self._events and not self._enclosing_phase and self._events[-1][0] != SYNC_PHASE:
            self._enclosing_phase = self._events[-1][0]
            self.enter(SYNC_PHASE, rank_span)

    def end_collective(self) -> None:
        """End the collective, and continue the phase around it."""
        if self._enclosing_phase:
            phase, self._enclosing_phase = self._enclosing_phase, ""
            self.enter(phase)

    def apply_delay(self) -> None:
        """Sleep as a slowed rank does, without ending the phase, before an action that other ranks wait for."""
        if self.delay_factor > 1 and self._events and self._events[-1][0] in COMPUTE_PHASES:
            self._sleep_for_delay(self._events[-1][1] if self._delayed_until is None else self._delayed_until)
            self._delayed_until = self.clock.record_mark()

    @property
    def enclosing_phase(self) -> str:
        """The current phase; during a collective, the phase around it."""
        return self._enclosing_phase or self.current_phase

    @property
    def current_phase(self) -> str:
        """The current phase; empty between steps."""
        return self._events[-1][0] if self._events else ""

    def get_progress(self) -> tuple[str, int]:
        """Return (current phase, number of events in this step) for another thread; ("", 0) between steps."""
        events = self._events  # read once, since the step may end meanwhile
        return (events[-1][0], len(events)) if events else ("", 0)

    def _sleep_for_delay(self, since: object) -> None:
        now = self.clock.record_mark()
        self.clock.synchronize()
        self._delay_owed_s += (self.delay_factor - 1) * self.clock.compute_elapsed(since, now)
        if self._delay_owed_s > 0:
            self._delay_owed_s -= _sleep_measured(self._delay_owed_s)

    def end_step(self) -> PhaseEvents:
        """End the step and return its events."""
        self.enter(END_OF_STEP)
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Discard the events of a failed step."""
        self._events, self._enclosing_phase, self._delayed_until, self._delay_owed_s = [], "", None, 0.0
        if self.on_phase is not None:
            self.on_phase("")


def _sleep_measured(seconds: float) -> float:
    """Sleep, and return the actual seconds."""
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


class StepTimes(NamedTuple):
    """Times of those steps that have the same events in the same order."""

    places: list[int]
    """Numbers of these steps among all."""
    phases: tuple[str, ...]
    positions: tuple[tuple[int, int] | None, ...]
    times: np.ndarray
    """Seconds at which each event begins, of shape (steps, events)."""


def group_steps(steps: Sequence[PhaseEvents]) -> list[StepTimes]:
    """Return the times of all steps as arrays. Marks are times. Most steps of a dispatch are in one group."""
    groups: dict[tuple[Any, Any], tuple[list[int], list[Any]]] = {}
    for place, events in enumerate(steps):
        phases, times, positions = zip(*events, strict=True)
        places, rows = groups.setdefault((phases, positions), ([], []))
        places.append(place)
        rows.append(times)
    return [StepTimes(places, *key, np.array(rows, float)) for key, (places, rows) in groups.items()]


def sum_durations(groups: Sequence[StepTimes], num_steps: int) -> dict[str, np.ndarray]:
    """Return the seconds of each step by phase, and those of the whole step as "step"."""
    sums: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(num_steps))
    for places, phases, _, times in groups:
        for phase, seconds in zip(phases, np.diff(times).T, strict=False):
            sums[phase][places] += seconds
        sums["step"][places] = times[:, -1] - times[:, 0]
    return sums


def build_spans(steps: Sequence[tuple[int, PhaseEvents]], rank: int, clock: Clock) -> np.ndarray:
    """Return the phases of these (step, events) as rows of dtype :data:`dtkit.history.timeline.SPAN_DTYPE`."""
    rows = [
        (step, rank, *_describe_span(phase, position), clock.read_mark(start), clock.read_mark(end))
        for step, events in steps
        for (phase, start, position), (_, end, _) in itertools.pairwise(events)
        if phase != BETWEEN_PHASES
    ]
    return np.array(rows, SPAN_DTYPE)


def _describe_span(phase: str, position: tuple[int, int] | None) -> tuple[str, int, int]:
    """Return (phase, stage, micro-batch) of a span."""
    if position is None:
        return phase, -1, -1
    return (f"{phase} {position[0]}-{position[1]}", -1, -1) if phase == SYNC_PHASE else (phase, *position)


def build_messages(groups: Sequence[StepTimes], step_numbers: Sequence[int]) -> np.ndarray:
    """Return the messages of these steps as rows of dtype :data:`dtkit.history.comm_time.MESSAGE_DTYPE`."""
    rows: list[tuple[Any, ...]] = []
    for places, phases, positions, times in groups:
        messages = [
            (k, _MESSAGE_PHASE_NUMBERS[phase], *position)
            for k, (phase, position) in enumerate(zip(phases, positions, strict=True))
            if position is not None and phase in _MESSAGE_PHASE_NUMBERS
        ]
        if messages:
            rows += [
                (step_numbers[place], *message, moments[k], moments[k + 1])
                for place, moments in zip(places, times.tolist(), strict=True)
                for k, *message in messages
            ]
    rows.sort(key=operator.itemgetter(0))  # messages of a step stay in order
    return np.array(rows, MESSAGE_DTYPE)


def build_blocked_times(groups: Sequence[StepTimes], num_steps: int) -> np.ndarray:
    """Return the begin, end and rank span of each collective as an array (steps, most collectives in a step, 3).

    Times are in seconds, as in `time.perf_counter`, which all processes of a host share. A rank span is a number that
    only the ranks of that collective have. Unused rows are NaN.
    """
    collectives = [[k for k, phase in enumerate(group.phases) if phase == SYNC_PHASE] for group in groups]
    blocked = np.full((num_steps, max(map(len, collectives), default=0), 3), np.nan)
    for group, events in zip(groups, collectives, strict=True):
        for row, k in enumerate(events):
            blocked[group.places, row, :2] = group.times[:, k : k + 2]
            blocked[group.places, row, 2] = _number_rank_span(group.positions[k])
    return blocked


def _number_rank_span(rank_span: tuple[int, int] | None) -> int:
    return -1 if rank_span is None else rank_span[0] * _MAX_RANKS + rank_span[1]

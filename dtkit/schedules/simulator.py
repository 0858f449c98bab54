"""Simulation of a schedule: start and end of each action, idle time, and held activations.

Each rank runs its row in order. An action starts when the rank is free and the actions that it needs have ended;
sending takes no time. So a simulation is the best case, to compare a measured timeline with.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from dtkit.schedules.validation import find_dependencies, index_actions, order_actions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit.schedules.action import Action, Row


class ScheduleTable(Protocol):
    """The part of a :class:`dtkit.schedules.schedule.Schedule` that a simulation reads."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The actions of each rank."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    @property
    def stages(self) -> int:
        """Number of stages."""

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""

    def get_bubble_formula(self) -> tuple[str, float] | None:
        """Return the formula of the bubble and its value."""


@dataclasses.dataclass(frozen=True, repr=False)
class Simulation:
    """Result of a simulation, in the unit of the given durations."""

    schedule: ScheduleTable
    intervals: Mapping[Action, tuple[float, float]]
    """(start, end) of each action, from 0."""
    makespan: float
    """Time from the first start to the last end."""
    bubble: float
    """Idle share of all ranks' time within the makespan."""
    peak_micro_batches: tuple[int, ...]
    """Largest number of micro-batches whose activations a rank holds at once, by rank."""

    @property
    def peak_activations(self) -> float:
        """Largest amount that a rank holds, in activations of one micro-batch through the whole model."""
        return max(self.peak_micro_batches) / self.schedule.stages

    def __repr__(self) -> str:
        peaks = ", ".join(map(str, self.peak_micro_batches))
        bubble = f"bubble {100 * self.bubble:.1f} %"
        return f"Simulation(time {self.makespan:g}, {bubble}, peak micro-batches by node: {peaks})"


def simulate(schedule: ScheduleTable, duration: Callable[[Action], float]) -> Simulation:
    """Simulate a schedule with a duration of at least 0 for each action."""
    cells = index_actions(schedule.rows)
    times: dict[Action, tuple[float, float]] = {}
    free, busy = [0.0] * schedule.ranks, 0.0
    for rank, _, action in order_actions(schedule.rows, cells):
        start = max([free[rank], *(times[needed][1] for needed in find_dependencies(action, cells))])
        seconds = duration(action)
        times[action] = start, start + seconds
        free[rank] = start + seconds
        busy += seconds
    makespan = max(free)
    idle = 1 - busy / (makespan * schedule.ranks) if makespan else 0.0
    return Simulation(
        schedule,
        times,
        makespan,
        idle,
        tuple(_count_peak_micro_batches(schedule, rank) for rank in range(schedule.ranks)),
    )


def _count_peak_micro_batches(schedule: ScheduleTable, rank: int) -> int:
    """Return the largest number of micro-batches between their forward and the end of their backward."""
    peak = held = 0
    for action in schedule.rows[rank]:
        if action is not None:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, held)
    return peak

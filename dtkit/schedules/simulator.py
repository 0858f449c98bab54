"""A schedule played through on paper: when each action begins and ends, who idles, and what is held meanwhile.

Each rank does its row in order. An action begins when the rank is free and what it needs has ended elsewhere; sending
takes no time. So this is the best that a schedule can do, and what a measured timeline is held against.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.schedules.validation import find_dependencies, index_actions, order_actions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit.schedules.action import Action
    from dtkit.schedules.schedule import Schedule


@dataclasses.dataclass(frozen=True, repr=False)
class Simulation:
    """When what would be done, in the unit of the durations that were given."""

    schedule: Schedule
    intervals: Mapping[Action, tuple[float, float]]
    """(begin, end) of each action, from 0."""
    makespan: float
    """From the first begin to the last end."""
    bubble: float
    """The share of all ranks' time from 0 to `makespan` in which they do nothing."""
    peak_micro_batches: tuple[int, ...]
    """For each rank, the most micro-batches whose activations its stages hold at once."""

    @property
    def peak_activations(self) -> float:
        """The most that a rank holds, in activations of one micro-batch of the whole model: stages count their part."""
        return max(self.peak_micro_batches) / self.schedule.stages

    def __repr__(self) -> str:
        held = ", ".join(map(str, self.peak_micro_batches))
        return f"Simulation(time {self.makespan:g}, bubble {self.bubble:.1%}, held at most by rank: {held})"


def simulate(schedule: Schedule, duration: Callable[[Action], float]) -> Simulation:
    """Play a schedule through, with a duration of each action from 0 up."""
    there = index_actions(schedule.rows)
    times: dict[Action, tuple[float, float]] = {}
    free, busy = [0.0] * schedule.ranks, 0.0
    for rank, _, action in order_actions(schedule.rows, there):
        begin = max([free[rank], *(times[one][1] for one in find_dependencies(action, there))])
        taken = duration(action)
        times[action] = begin, begin + taken
        free[rank] = begin + taken
        busy += taken
    makespan = max(free)
    idle = 1 - busy / (makespan * schedule.ranks) if makespan else 0.0
    return Simulation(
        schedule,
        times,
        makespan,
        idle,
        tuple(_count_peak_micro_batches(schedule, rank) for rank in range(schedule.ranks)),
    )


def _count_peak_micro_batches(schedule: Schedule, rank: int) -> int:
    """Forward begins to hold a micro-batch's activations; the end of its backward, or of the weights' half, lets go."""
    most = now = 0
    for action in schedule.rows[rank]:
        if action is not None:
            now += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, now)
    return most

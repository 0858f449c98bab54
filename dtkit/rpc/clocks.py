"""Clocks of several hosts, compared by barriers.

Every rank notes its clock before and after each of several barriers. No rank leaves a barrier before all have entered
it. So rank r's clock after a barrier is later than rank 0's before it, and the other way round. Each barrier thus
bounds r's lead from both sides, however slow or asymmetric the network is. The tightest bounds of all barriers remain.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtkit._util import formatting, timeouts

if TYPE_CHECKING:
    from collections.abc import Sequence


class ClockReading(NamedTuple):
    """One rank's clocks at one barrier, in seconds."""

    begin: float
    """`time.perf_counter` before the barrier."""
    end: float
    """The same after it."""
    wall: float
    """`time.time` at `end`."""


@dataclasses.dataclass(frozen=True)
class ClockComparison:
    """Clocks of all ranks relative to rank 0's, in seconds by rank."""

    offsets: tuple[float, ...]
    """Lead of `time.perf_counter`, which timelines use."""
    errors: tuple[float, ...]
    """Largest error of `offsets`."""
    wall_offsets: tuple[float, ...]
    """Lead of the time of day, with the same error. Times in logs differ by it."""

    @classmethod
    def from_readings(cls, readings: Sequence[Sequence[ClockReading]]) -> ClockComparison:
        """Compare the readings of all ranks, which took part in the same barriers."""
        begin, end, wall = np.moveaxis(np.array(readings, dtype=np.float64), 2, 0)
        largest = (end - begin[0]).min(axis=1)
        smallest = (begin - end[0]).max(axis=1)
        offsets, errors = (largest + smallest) / 2, np.abs(largest - smallest) / 2
        offsets[0] = errors[0] = 0.0
        day = np.median(wall - end, axis=1)  # time of day at which each clock was 0
        walls = offsets + day - day[0]
        return cls(tuple(offsets.tolist()), tuple(errors.tolist()), tuple(walls.tolist()))

    def describe(self, hosts: Sequence[str]) -> list[str]:
        """Return sentences on hosts whose clocks differ much, or could not be compared well. `hosts` are by rank."""
        ranks = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
        notes = []
        for host, rank in reversed(ranks.items()):
            lead, error = self.wall_offsets[rank], formatting.format_duration(self.errors[rank])
            if abs(lead) - self.errors[rank] >= timeouts.MENTIONED_CLOCK_LEAD_S:
                side = "ahead of" if lead > 0 else "behind"
                notes.append(
                    f"The clock of {host} is {formatting.format_duration(abs(lead))} {side} that of {hosts[0]} (to "
                    f"within {error}): times in logs differ, and timelines are corrected."
                )
            elif self.errors[rank] >= timeouts.MENTIONED_CLOCK_ERROR_S:
                notes.append(f"Timelines of {host} are exact to {error} only: the network is slow.")
        return notes

"""Nodes that wait for a core: their steps take longer on the clock than their processes have had of the processor.

A node's computing takes about one core or more. If its process had much less, and the load exceeds the cores of its
host, other processes had them. The system monitor samples both numbers. A node that reads or sleeps has little
processor time too, but adds nothing to the load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtkit.history.scalars import SYSTEM_PREFIX

if TYPE_CHECKING:
    from dtkit.dashboard.summary.measurements import Measurements
    from dtkit.history.history import History

MAX_CORE_SHARE = 0.75
"""Largest share of a core that a starved node has while it computes."""

MIN_LOAD = 1.25
"""Smallest load for each core of a host whose cores are busy: the kernel's mean of the last minute."""

_CPU, _LOAD, _GPU = (SYSTEM_PREFIX + name for name in ("CPU (cores)", "load (per core)", "GPU (%)"))


class BusyCores(NamedTuple):
    """The node that waits longest for a core."""

    rank: int
    cores: float
    """Cores that its process had, in the median of the samples: some may be from a pause."""
    computing_share: float
    """Share of a step in which the node computes, by the clock."""
    load: float
    """Processes that run or want to, for each core of its host."""
    saved_s: float
    """Seconds of a step that the slowest node would save with a core of its own."""


def find_busy_cores(facts: Measurements, history: History) -> BusyCores | None:
    """Return the node that waits longest for a core in the measured steps; None if none does, or on GPUs."""
    if not {_CPU, _LOAD} <= set(history.system_names) or _GPU in history.system_names:
        return None
    found = [one for index in range(len(facts.ranks)) if (one := _find_on_node(facts, history, index)) is not None]
    return max(found, key=lambda one: one.saved_s, default=None)


def _find_on_node(facts: Measurements, history: History, index: int) -> BusyCores | None:
    rank, since = int(facts.ranks[index]), facts.timing.first_step
    cores, load = (_median(history.scalar(name, rank, since=since)[1]) for name in (_CPU, _LOAD))
    computing_s = float(facts.compute_s[index] - facts.get("data")[index])
    share = computing_s / float(facts.phases[index].sum())
    if not (np.isfinite([cores, load]).all() and load >= MIN_LOAD and cores < MAX_CORE_SHARE * share):
        return None
    saved_s = float(facts.compute_s.max() - (facts.compute_s[index] - computing_s * (1 - cores / share)))
    return BusyCores(rank, cores, share, load, max(0.0, min(saved_s, computing_s * (1 - cores / share))))


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else float("nan")

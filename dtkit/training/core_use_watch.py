"""The watch over other processes that take the cores from the nodes of a run: who they are, for its verdict.

Engines report how long they wait for a core. While they wait, the notebook counts the processor time of all processes
on its host, at first as often as reports arrive and then less and less often: a count takes some milliseconds from the
engines. While they don't wait, it counts nothing.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.processor_use import ProcessorCount
from dtkit.history.core_use import CoreUse, record_core_use
from dtkit.history.scalars import CORE_WAIT_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dtkit.history.history import History
    from dtkit.messages import DispatchResult
    from dtkit.rpc.engine_group import EngineGroup

# Between two counts, in periods of the engines' reports:
_FIRST_PERIODS = 0.5  # ranks report at about the same time
_MOST_PERIODS = 8.0  # once the run has waited for long
_MAX_PERIODS = 16  # a longer time has parts in which no engine waited
_MIN_WAIT_PERCENT = 4.0  # below what a verdict mentions


class CoreUseWatch:
    """Counts for the run of `history`, whenever an engine of this host has waited for a core."""

    def __init__(self, engine_group: EngineGroup, history: History) -> None:
        self._engine_group, self._history = engine_group, history
        self._last = ProcessorCount.take()
        self._periods = _FIRST_PERIODS

    def update(self, results: Iterable[tuple[int, DispatchResult]]) -> None:
        """Count if some rank has waited, and record who had the cores since the last count, if that is recent."""
        seconds = time.monotonic() - self._last.at_s
        if seconds < self._periods * timeouts.SYSTEM_SAMPLE_S:
            return
        starved = {rank: result.step for rank, result in results if _has_waited(result)}
        if not starved:
            return
        host = socket.gethostname()
        own = {node.rank: node.pid for node in self._engine_group.nodes if node.host == host and node.device == "cpu"}
        if not starved.keys() & own.keys():
            return
        count = ProcessorCount.take()
        is_recent = seconds <= _MAX_PERIODS * timeouts.SYSTEM_SAMPLE_S
        if is_recent:
            cores = self._last.measure_others(count, own.values())
            record_core_use(self._history, CoreUse(max(starved.values()), host, cores))
        self._last, self._periods = count, min(2 * self._periods, _MOST_PERIODS) if is_recent else _FIRST_PERIODS


def _has_waited(result: DispatchResult) -> bool:
    """Return whether a rank reports that it has waited for a core for a considerable share of its time."""
    return any(total > _MIN_WAIT_PERCENT * weight for _, total, weight in result.scalars.get(CORE_WAIT_NAME, ()))

"""Calls that the notebook no longer waits for, because of an interrupt.

While a run trains, a cell's call is queued behind a dispatch or two. An interrupt of that call must not reach an engine
that takes a step. Otherwise ranks could be at different steps, and might have to go back to the last snapshot. So the
interrupt waits until the engines' watchdogs report the call. Most calls have ended by then.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from dtkit.health.status import EngineStatus
    from dtkit.messages import Reply


@dataclasses.dataclass(frozen=True)
class AbandonedCall:
    """One request to these ranks, with a future for each. There are no futures if the interrupt came during sending."""

    op: str
    generation: int
    """Generation of the process group that the call was sent to."""
    ranks: Sequence[int]
    futures: Sequence[Future[Reply[Any]]]

    def get_pending_ranks(self) -> list[int]:
        """Return the ranks that have not replied."""
        if not self.futures:
            return list(self.ranks)
        return [rank for rank, future in zip(self.ranks, self.futures, strict=True) if not future.done()]

    def wait_for_turn(self, read_status: Callable[[int], EngineStatus | None]) -> bool:
        """Wait until every rank that has not replied runs this call; return False after a time limit.

        `read_status` returns the last status of a rank's watchdog. A rank without a status, or one that is stuck in an
        earlier call, doesn't delay the interrupt.
        """
        first, begun = {rank: read_status(rank) for rank in self.get_pending_ranks()}, time.monotonic()
        while any(
            self._is_before_turn(first[rank], read_status(rank), time.monotonic() - begun)
            for rank in self.get_pending_ranks()
        ):
            if time.monotonic() - begun > timeouts.TURN_TIMEOUT_S:
                return False
            concurrent.futures.wait(self.futures, timeouts.SHORT_INTERRUPT_POLL_S)
        return True

    def _is_before_turn(self, first_status: EngineStatus | None, status: EngineStatus | None, waited_s: float) -> bool:
        """Return whether a rank still runs an earlier call."""
        if status is None:
            return False
        if first_status is not None and status.observed_at == first_status.observed_at:  # it may be outdated
            return waited_s < timeouts.TURN_STATUS_TIMEOUT_S
        return status.op != self.op and status.stalled_s < timeouts.TURN_STALLED_S

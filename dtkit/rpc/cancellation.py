"""A call that nobody waits for any longer, and its turn on the engines: what they do before it is somebody else's.

While a run trains, what a cell asks stands in line behind a dispatch or two. An interrupt that is meant for it must not
reach an engine that takes a step: broken off there, ranks may stand apart by one, and where each has a part of its own
all go back to the last snapshot. So it waits until the engines are at the call, as their watchdogs tell, which are half
a second late at most. Most calls are answered by then, and nothing is to be broken off.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from dtkit.health.status import EngineStatus
    from dtkit.types import Reply

TURN_TIMEOUT_S = 20.0  # to wait for a call's turn
_STALLED_S = 10.0  # that an engine may make no progress with what it does before: then it is stuck in that
_STATUS_TIMEOUT_S = 2.0  # that its watchdog may write nothing
_WAIT_SLICE_S = 0.1


@dataclasses.dataclass(frozen=True)
class AbandonedCall:
    """One request to these ranks, a future each; without futures the sending was broken off."""

    op: str
    generation: int
    """Of the group that it was meant for."""
    ranks: Sequence[int]
    futures: Sequence[Future[Reply]]

    def get_pending_ranks(self) -> list[int]:
        """The ranks that have not answered."""
        if not self.futures:
            return list(self.ranks)
        return [rank for rank, future in zip(self.ranks, self.futures, strict=True) if not future.done()]

    def wait_for_turn(self, read_status: Callable[[int], EngineStatus | None]) -> bool:
        """Wait for its turn on every rank that has not answered. False where that is still far.

        `look` tells what a rank's watchdog wrote last. Of one of whom nothing is known, or that is stuck in what comes
        before, it is taken to have come.
        """
        first, begun = {rank: read_status(rank) for rank in self.get_pending_ranks()}, time.monotonic()
        while any(
            self._is_before_turn(first[rank], read_status(rank), time.monotonic() - begun)
            for rank in self.get_pending_ranks()
        ):
            if time.monotonic() - begun > TURN_TIMEOUT_S:
                return False
            concurrent.futures.wait(self.futures, _WAIT_SLICE_S)
        return True

    def _is_before_turn(self, first_status: EngineStatus | None, status: EngineStatus | None, waited_s: float) -> bool:
        """Whether a rank has not come to this call."""
        if status is None:
            return False
        if (
            first_status is not None and status.observed_at == first_status.observed_at
        ):  # of a moment at which it may have done another call
            return waited_s < _STATUS_TIMEOUT_S
        return status.op != self.op and status.stalled_s < _STALLED_S

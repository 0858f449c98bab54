"""A call of the user's own function whose ranks wait for a collective that another rank never begins."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.health.diagnosis import diagnose
from dtkit.health.stacks import StatusProbe
from dtkit.health.stall_report import report_all_stalled, report_stuck

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.health.diagnosis import RankObservation
    from dtkit.rpc.engine_group import EngineGroup


class CallStallWatch:
    """Tells once that the ranks of a call wait in vain. A rank that computes while others wait is no stall."""

    def __init__(self, engine_group: EngineGroup, tell: Callable[[str], None]) -> None:
        self._engine_group, self._tell = engine_group, tell
        self._next_check = time.monotonic() + timeouts.CALL_STALL_LIMIT_S
        self._has_told = False

    def check(self) -> None:
        """Look at the ranks, if that is due."""
        if self._has_told or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + timeouts.STALL_LIMIT_S
        text = describe_stall(self._probe())
        if text is not None:
            self._has_told = True
            self._tell(text)

    @functools.cached_property
    def _probe(self) -> StatusProbe:
        group = self._engine_group
        inspect = None if group.transport.hosts is None else group.transport.hosts.inspect_process
        return StatusProbe(group.folder, lambda: group.nodes, inspect)


def describe_stall(observations: Sequence[RankObservation]) -> str | None:
    """Return why the ranks of a call will not go on; None if they may."""
    in_call = [obs for obs in observations if obs.status is not None and obs.status.op is not None]
    if not in_call or any(not obs.status.is_blocked for obs in in_call if obs.status is not None):
        return None
    if min(obs.stalled_s for obs in in_call) < timeouts.CALL_STALL_LIMIT_S:
        return None
    diagnosis = diagnose(observations)
    if diagnosis is None or diagnosis.cause not in ("returned", "other", "apart"):
        return None
    if diagnosis.rank is None:
        return report_all_stalled(diagnosis.cause, observations).text
    return report_stuck(diagnosis.cause, observations[diagnosis.rank], len(observations)).text

"""Whether ranks that hold the same parameters still do: checksums compared in the notebook, a few times a minute.

Every rank adds checksums of its parameters to the results of a dispatch, so that comparing them costs no collective.
They are asked for so rarely that computing them stays under 0.4 % of the time.

Each checksum is of one part of the model, and names it: a stage of a pipeline, one of the shards of a layer, or the
whole. It is compared among the ranks that hold this part, which are as many as there are replicas.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.types import ReplicaCheckResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.types import Fingerprint

MAX_TIME_FRACTION = 0.004  # of the time that checksums may take


class ReplicaChecker:
    """When to ask for checksums, and the result of the last comparison. Times are of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.result: ReplicaCheckResult | None = None
        self._next_check_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether the next dispatch should bring checksums."""
        return now >= self._next_check_at

    def on_sent(self, now: float) -> None:
        """Note that a dispatch brings checksums: those that are sent before it returns need not."""
        self._next_check_at = now + timeouts.REPLICA_CHECK_INTERVAL_S

    def on_result(self, now: float, step: int, fingerprints: Sequence[Fingerprint | None], seconds: float) -> bool:
        """Compare the checksums of all ranks after `step` updates, computed in `seconds`; return whether this is news.

        None from any rank: parameters need not be equal at this step, and the next dispatch should ask again.
        """
        known = [fingerprint for fingerprint in fingerprints if fingerprint is not None]
        if len(known) < len(fingerprints):
            self._next_check_at = now
            return False
        sums = group_by_shard(known)
        shared = [by_rank for by_rank in sums.values() if len(by_rank) > 1]
        self._next_check_at = now + max(
            timeouts.REPLICA_CHECK_INTERVAL_S if shared else timeouts.UNSHARED_REPLICA_CHECK_INTERVAL_S,
            seconds / MAX_TIME_FRACTION,
        )
        before, self.result = self.result, None
        if not shared:
            return False
        differing = tuple(sorted({rank for by_rank in shared for rank in find_outliers(by_rank)}))
        since = before.differing_since if before is not None and before.differing_since is not None else step
        num_holders = min((len(by_rank) for part, by_rank in sums.items() if part), default=None)
        self.result = ReplicaCheckResult(step, differing, since if differing else None, num_holders)
        return before is None or differing != before.differing_ranks


def group_by_shard(fingerprints: Sequence[Fingerprint]) -> dict[tuple[int, ...], dict[int, int]]:
    """Return {part of the model: {rank that holds it: checksum}}."""
    sums: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, fingerprint in enumerate(fingerprints):
        for part, value in fingerprint.items():
            sums.setdefault(part, {})[rank] = value
    return sums


def find_outliers(checksums: Mapping[int, int]) -> list[int]:
    """Return the ranks whose checksum is not the majority's; all ranks where there is no majority."""
    common, count = collections.Counter(checksums.values()).most_common(1)[0]
    if count == len(checksums):
        return []
    return [rank for rank, value in checksums.items() if value != common or 2 * count <= len(checksums)]

"""Check that replicas still have equal parameters: the notebook compares checksums a few times a minute.

Every rank adds checksums of its parameters to the results of a dispatch, so no collective is necessary. They are
requested so rarely that computing them takes less than 0.4 % of the time.

Each checksum names its part of the model: a stage of a pipeline, a shard of a layer, or the whole. It is compared among
the ranks that hold this part, one of each replica.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.types import ReplicaCheckResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.messages import Fingerprint

MAX_TIME_FRACTION = 0.004  # share of the time that checksums may take


class ReplicaChecker:
    """Decides when to request checksums, and has the result of the last comparison. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self.result: ReplicaCheckResult | None = None
        self._next_check_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether the next dispatch should return checksums."""
        return now >= self._next_check_at

    def on_sent(self, now: float) -> None:
        """Note that a dispatch will return checksums. Dispatches that are sent before it returns need none."""
        self._next_check_at = now + timeouts.REPLICA_CHECK_INTERVAL_S

    def on_result(self, now: float, step: int, fingerprints: Sequence[Fingerprint | None], seconds: float) -> bool:
        """Compare the checksums of all ranks after `step` updates, computed in `seconds`. Return whether the result is
        new.

        If any rank sent None, parameters need not be equal at this step, and the next dispatch requests checksums
        again.
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
    """Return the ranks whose checksum differs from the majority's; all ranks if there is no majority."""
    majority, count = collections.Counter(checksums.values()).most_common(1)[0]
    if count == len(checksums):
        return []
    return [rank for rank, value in checksums.items() if value != majority or 2 * count <= len(checksums)]

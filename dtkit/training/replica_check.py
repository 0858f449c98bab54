"""Whether ranks that hold the same parameters still do: checksums compared in the notebook, a few times a minute.

Every rank adds checksums of its parameters to what a dispatch returns anyway, so that comparing costs no collective.
They are asked for so rarely that making them stays under 0.4 % of the time.

Each checksum is of one part of the model, and says which: a stage of a pipeline, one of the slices that layers were cut
into, or the whole. It is compared among the ranks that tell of the same part, which are as many as there are replicas.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from dtkit.types import ReplicaCheckResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.types import Fingerprint

MAX_TIME_FRACTION = 0.004  # of the time that checksums may take
MIN_INTERVAL_S = 1.0
UNSHARED_INTERVAL_S = 60.0  # between two looks whether any two ranks hold the same, where none did


class ReplicaChecker:
    """When to ask for checksums, and what they said."""

    def __init__(self) -> None:
        self.result: ReplicaCheckResult | None = None
        self._next_check_at = 0.0

    def is_due(self, now: float) -> bool:
        """Whether the next dispatch should bring checksums. `now` is in seconds, of a clock that never goes back."""
        if now < self._next_check_at:
            return False
        self._next_check_at = now + MIN_INTERVAL_S  # those that are sent before it lands need not
        return True

    def on_result(self, now: float, step: int, fingerprints: Sequence[Fingerprint | None], seconds: float) -> bool:
        """Take in the checksums of all ranks after `step` updates, made in `seconds`; whether this is news.

        None from any rank: parameters need not be equal at this step, and the next dispatch should ask again.
        """
        told = [found for found in fingerprints if found is not None]
        if len(told) < len(fingerprints):
            self._next_check_at = now
            return False
        sums = group_by_shard(told)
        shared = [by_rank for by_rank in sums.values() if len(by_rank) > 1]
        self._next_check_at = now + max(MIN_INTERVAL_S if shared else UNSHARED_INTERVAL_S, seconds / MAX_TIME_FRACTION)
        before, self.result = self.result, None
        if not shared:
            return False
        differing = tuple(sorted({rank for by_rank in shared for rank in find_outliers(by_rank)}))
        since = before.differing_since if before is not None and before.differing_since is not None else step
        copies = min((len(by_rank) for part, by_rank in sums.items() if part), default=None)
        self.result = ReplicaCheckResult(step, differing, since if differing else None, copies)
        return before is None or differing != before.differing_ranks


def group_by_shard(fingerprints: Sequence[Fingerprint]) -> dict[tuple[int, ...], dict[int, int]]:
    """{part of the model: {rank that holds it: checksum}}."""
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, sums in enumerate(fingerprints):
        for part, value in sums.items():
            found.setdefault(part, {})[rank] = value
    return found


def find_outliers(checksums: Mapping[int, int]) -> list[int]:
    """The ranks whose checksum is not that of most of them; all, where no checksum is: nobody can say who is right."""
    common, count = collections.Counter(checksums.values()).most_common(1)[0]
    if count == len(checksums):
        return []
    return [rank for rank, value in checksums.items() if value != common or 2 * count <= len(checksums)]

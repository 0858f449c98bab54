"""Whether all ranks still hold the same parameters: checksums compared in the notebook, a few times a minute.

Every rank adds a checksum of its parameters to what a dispatch returns anyway, so that comparing costs no collective.
It is asked for so rarely that making it stays under 0.4 % of the time.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from dtkit.records import Consistency

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARE = 0.004  # of the time that checksums may take
LEAST_S = 1.0


class Watch:
    """When to ask for checksums, and what they said."""

    def __init__(self) -> None:
        self.found: Consistency | None = None
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Whether the next dispatch should bring checksums. `now` is in seconds, of a clock that never goes back."""
        if now < self._next:
            return False
        self._next = now + LEAST_S  # those that are sent before it lands need not
        return True

    def landed(self, now: float, step: int, fingerprints: Sequence[int | None], seconds: float) -> bool:
        """Take in the checksums of all ranks after `step` updates, made in `seconds`; whether this is news.

        None from any rank: parameters need not be equal at this step, and the next dispatch should ask again.
        """
        values = [value for value in fingerprints if value is not None]
        if len(values) < len(fingerprints) or not values:
            self._next = now
            return False
        self._next = now + max(LEAST_S, seconds / SHARE)
        common, count = collections.Counter(values).most_common(1)[0]
        # Where no value is most ranks' own, nobody can say who is right: all differ.
        differing = tuple(r for r, value in enumerate(values) if value != common or 2 * count <= len(values))
        if len(set(values)) == 1:
            differing = ()
        before = self.found.since if self.found is not None else None
        news = self.found is None or differing != self.found.differing
        self.found = Consistency(step, differing, (before if before is not None else step) if differing else None)
        return news

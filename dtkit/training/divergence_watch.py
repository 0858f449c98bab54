"""The watch over a run's loss: a divergence goes into the log once, when it is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.history.divergence import MIN_STEPS, find_divergence

if TYPE_CHECKING:
    from dtkit.history.divergence import Divergence
    from dtkit.history.history import History


class DivergenceWatch:
    """Looks at the loss of `history` every few steps."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._num_seen = 0
        self._has_diverged = False

    def find_new(self) -> Divergence | None:
        """Return a divergence that the last look did not find. After a recovery the next one is new again."""
        num_steps = self._history.num_totals
        if num_steps - self._num_seen < MIN_STEPS:
            return None
        self._num_seen = num_steps
        divergence, had_diverged = find_divergence(self._history), self._has_diverged
        self._has_diverged = divergence is not None
        return None if had_diverged else divergence

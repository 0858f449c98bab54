"""Last values of the user's own numbers, for the titles of charts between two messages with curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.summary.last_scalar import read_recent_scalar

if TYPE_CHECKING:
    from dtkit.history.history import History

MAX_NUMBERS = 12
"""As many as the page has charts of the user's own numbers."""


def read_last_numbers(history: History, step: int) -> dict[str, float]:
    """Return the last values of numbers that were logged a short while ago, by name. A rarer one has its curve."""
    found = {name: read_recent_scalar(history, name, step) for name in history.scalar_names[:MAX_NUMBERS]}
    return {name: value for name, value in found.items() if value is not None}

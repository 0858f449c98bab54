"""Last values of the user's own numbers, for the titles of charts between two messages with curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dtkit.history.history import History

MAX_NUMBERS = 12
"""As many as the page has charts of the user's own numbers."""
RECENT_STEPS = 100
"""How far back a last value is looked for. A rarer one comes with its curve."""


def read_last_numbers(history: History, step: int) -> dict[str, float]:
    """Return the last finite mean over all ranks of each number that was logged a short while ago, by name."""
    since = step - RECENT_STEPS
    last = {}
    for name in history.scalar_names[:MAX_NUMBERS]:
        _, values = history.scalar(name, since=since)
        known = values[np.isfinite(values)]
        if len(known):
            last[name] = float(known[-1])
    return last

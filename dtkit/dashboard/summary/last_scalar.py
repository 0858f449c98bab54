"""The last value of a number that the user logs. Views ask for it with each message, so few steps are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dtkit.history.history import History

RECENT_STEPS = 100
"""How far back a last value is looked for first."""


def read_last_scalar(history: History, name: str) -> float | None:
    """Return the last finite mean over all ranks; None for a name that is not logged in the training."""
    if name not in history.scalar_names:
        return None
    recent = read_recent_scalar(history, name, history.num_steps)
    return _take_last(history.scalar(name)[1]) if recent is None else recent  # a number that is rarely logged


def read_recent_scalar(history: History, name: str, step: int) -> float | None:
    """Return the same among the last steps before `step`."""
    return _take_last(history.scalar(name, since=step - RECENT_STEPS)[1])


def _take_last(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None

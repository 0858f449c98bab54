"""The rule by which a new learning rate is far above the last one, so maybe mistyped: `run.set` warns, pages ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dtkit.history.history import History

MAX_FACTOR = 100
"""Factor on the last rate that was not 0, from which on a rate is far."""

_MAX_ROWS = 100_000  # latest ones, among which the rate before a pause of the optimizer is looked for


def describe_rate_jump(history: History, current: float | None, lr: float) -> str:
    """Return a text such as ``1e+10 times the 0.1 before``; empty where a rate is not far above the last one."""
    before = current or _find_last_rate(history)
    if not before or lr < MAX_FACTOR * before:
        return ""
    return f"{lr / before:.3g} times the {before:.6g} before"


def _find_last_rate(history: History) -> float | None:
    """Return the last rate that was not 0; None without one."""
    rates = history.rows(max(0, len(history) - _MAX_ROWS))["lr"]
    used = np.flatnonzero(rates > 0)
    return float(rates[used[-1]]) if len(used) else None

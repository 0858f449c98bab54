"""The rule by which a new learning rate is far from the last one, so maybe mistyped: `run.set` warns, pages ask.

The last rate may be such a slip itself. A rate that is near the one before it is the way back, and no other slip.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit.history.remembered import remember_while

if TYPE_CHECKING:
    from dtkit.history.history import History

MAX_FACTOR = 100
"""Factor from which on a rate is far above another one, and beyond which it is far below."""

_MAX_ROWS = 20_000  # latest ones, among which earlier rates are looked for
_MAX_SHOWN_FACTOR = 1e6  # a larger one is a slip in any case, and as a number hard to read
_TOLERANCE = 1 + 1e-9  # 0.0007 is one hundredth of 0.07, but not in floating point


def describe_rate_jump(history: History, current: float | None, lr: float) -> str:
    """Return a text such as ``500 times the 0.1 before``; empty where a rate is near the last one, or is 0."""
    rates = find_reference_rates(history, current)
    if not lr or not rates or any(not _is_far(rate, lr) for rate in rates):
        return ""
    before = min(rates, key=lambda rate: abs(math.log(rate) - math.log(lr)))
    is_higher, known = lr > before, f"the {before:.6g} before"
    log_factor = abs(math.log(before) - math.log(lr))  # the factor itself may be beyond floating point
    if log_factor > math.log(_MAX_SHOWN_FACTOR) + 1e-9:
        return f"more than a million times {known}" if is_higher else f"less than a millionth of {known}"
    factor = f"{float(f'{math.exp(log_factor):.3g}'):,.0f}"
    return f"{factor} times {known}" if is_higher else f"1/{factor} of {known}"


def find_reference_rates(history: History, current: float | None) -> list[float]:
    """Return the last rate that was not 0, and the last one that was far from it, where there are any."""
    if current and not _count_settings(history):  # nobody has set any, and a schedule makes no slip
        return [current]
    return _search_rates(history, current)


def _count_settings(history: History) -> int:
    return sum(event.kind == "lr" for event in history.events)


# A view asks with each message, and most rows are as they were.
@remember_while(lambda history: (_count_settings(history), len(history.returns)))
def _search_rates(history: History, current: float | None) -> list[float]:
    rates = history.rows(max(0, len(history) - _MAX_ROWS))["lr"]
    if not current:
        used = np.flatnonzero(rates > 0)
        current = float(rates[used[-1]]) if len(used) else None
    if not current:
        return []
    far = np.flatnonzero((rates > 0) & ((rates <= current / MAX_FACTOR) | (rates > current * MAX_FACTOR * _TOLERANCE)))
    return [current, *([float(rates[far[-1]])] if len(far) else [])]


def _is_far(before: float, lr: float) -> bool:
    """Return whether a rate is far from the one before: a hundredfold, or less than a hundredth."""
    return lr >= MAX_FACTOR * before or lr * MAX_FACTOR * _TOLERANCE < before

"""Round numbers for axes, linear and logarithmic, as in ``static/numbers.js``."""

from __future__ import annotations

import math

_NUM_TICKS = 5
_MAX_DECADES = 8  # that all have a number
_ROUND_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # in s


def choose_ticks(low: float, high: float) -> list[float]:
    """Return round numbers within the limits, about five of them."""
    if high <= low:
        return [low]
    raw = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [k * width for k in range(math.ceil(low / width), math.floor(high / width) + 1)]


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers for a logarithmic axis between positive limits.

    They are powers of ten, with numbers between them where there are few. Where the limits contain at most one of
    these, they are the numbers of a linear axis, so that an axis never has a single number.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    factors = (1,) if decades > _NUM_TICKS else (1, 3) if decades > 2 else (1, 2, 5)
    every = max(1, math.ceil(decades / _MAX_DECADES))
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    within = [tick for tick in found if low <= tick <= high]
    return within if len(within) > 1 else choose_ticks(low, high)


def choose_time_ticks(low: float, high: float) -> list[float]:
    """Return round times within the limits, in seconds, at most five of them."""
    wanted = (high - low) / _NUM_TICKS
    width = next((seconds for seconds in _ROUND_TIMES if seconds >= wanted), None)
    if wanted < 1 or width is None:
        return choose_ticks(low, high)
    return [float(k * width) for k in range(math.ceil(low / width), math.floor(high / width) + 1)]

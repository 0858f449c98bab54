"""Times of one line of arithmetic, rounded so that it adds up as printed: ``11.30 ms - 10.55 ms = 0.75 ms``.

Each time by itself would be rounded to two or three digits, and small differences of large times would be wrong.
Here all times of a line are multiples of one number, which is fine enough for the smallest of them.
"""

from __future__ import annotations

import math

_DIGITS = 3  # of the smallest time
_MAX_DIGITS = 6  # of the largest one, unless the smallest would then be 0
_NOISE = 1e-12  # of two times; a smaller difference is the rounding of floats
_UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_ROUNDS_UP = 0.9995  # of the next unit, as in formatting.format_duration


class PrintedTimes:
    """Rounds and prints the times of a line. All have one unit, and no zeros at their ends that all have."""

    def __init__(self, *seconds: float) -> None:
        sizes = [abs(each) for each in seconds if each] or [1.0]
        self._unit_s, self._unit = next(
            (unit for k, unit in enumerate(_UNITS[:-1]) if max(sizes) < _ROUNDS_UP * _UNITS[k + 1][0]), _UNITS[-1]
        )
        smallest, largest = (_floor_log10(size / self._unit_s) for size in (min(sizes), max(sizes)))
        places = max(0, min(_DIGITS - 1 - smallest, max(-smallest, _MAX_DIGITS - 1 - largest)))
        numbers = [f"{each / self._unit_s:.{places}f}" for each in seconds]
        self._places = places - min((_count_end_zeros(number) for number in numbers), default=0)

    def round(self, seconds: float) -> float:
        """Return the time as it is printed, in seconds."""
        return round(seconds / self._unit_s, self._places) * self._unit_s

    def __call__(self, seconds: float) -> str:
        """Return the time as text."""
        number = f"{seconds / self._unit_s:.{self._places}f}"
        return f"{number} {self._unit}"


def describe_difference(whole_s: float, part_s: float) -> tuple[str, str]:
    """Return "whole - part = rest" and "whole / rest = ratio", which both add up as printed."""
    difference_s = whole_s - part_s
    show = PrintedTimes(whole_s, part_s, difference_s if abs(difference_s) > _NOISE * whole_s else 0.0)
    whole, part = show.round(whole_s), show.round(part_s)
    rest = show.round(whole - part)
    ratio = f"{show(whole)} / {show(rest)} = {whole / rest:.2f}" if rest else ""
    return f"{show(whole)} - {show(part)} = {show(rest)}", ratio


def _floor_log10(number: float) -> int:
    return math.floor(math.log10(number))


def _count_end_zeros(number: str) -> int:
    _, point, decimals = number.partition(".")
    return len(decimals) - len(decimals.rstrip("0")) if point else 0

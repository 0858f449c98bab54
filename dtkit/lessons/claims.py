"""A measured number next to the theory's value and to the reader's guess, which are judged separately."""

from __future__ import annotations

import dataclasses
import html
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

_CLOSE_FACTOR = 2  # a guess of a duration is close within this factor: durations vary from machine to machine
_ROUNDING = 1e-9  # a number below it is 0 up to rounding
_GOOD_COLOR, _BAD_COLOR = "#2a9d5c", "#d1495b"  # readable on white and on black


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A measured number and the reader's guess of it, or None without a guess."""

    quantity: str
    measured: float
    guess: float | None = None
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether theory and measurement agree. NaN never does."""
        raise NotImplementedError

    @property
    def verdict(self) -> str:
        """A few words with a mark, so that color isn't needed."""
        raise NotImplementedError

    @property
    def theory(self) -> str:
        """The theory's statement about the number."""
        raise NotImplementedError

    @property
    def is_guess_right(self) -> bool:
        """Whether there is a guess that is close enough."""
        raise NotImplementedError

    @property
    def guess_error(self) -> str:
        """The guess's distance from the measurement, in words."""
        assert self.guess is not None
        return f"off by {self._with_unit(abs(self.measured - self.guess))}"

    @property
    def guess_text(self) -> str:
        """The guess and whether it is right; "no guess" without one."""
        if self.guess is None:
            return "no guess"
        comment = "right" if self.is_guess_right else self.guess_error
        return f"your guess: {self._with_unit(self.guess)}, {comment}"

    @property
    def measured_text(self) -> str:
        """The measured number with its unit."""
        return self._with_unit(self.measured)

    def _with_unit(self, number: float) -> str:
        return f"{format_number(number)} {self.unit}".rstrip()

    def __repr__(self) -> str:
        first = f"{self.verdict}  {self.quantity}: measured {self.measured_text}; {self.theory}"
        return f"{first}\n{' ' * (len(self.verdict) + 2)}{self.guess_text}"

    def _repr_html_(self) -> str:
        color = _GOOD_COLOR if self.holds else _BAD_COLOR
        return (
            f'<div style="border-left:4px solid {color};padding:1px 0 1px 10px;margin:2px 0;line-height:1.5">'
            f'<span style="color:{color};font-weight:600">{self.verdict}</span> &ensp;'
            f"{html.escape(self.quantity)}: <b>{html.escape(self.measured_text)}</b> measured, "
            f"{html.escape(self.theory).replace('± ', '±&nbsp;')}<br>"
            f'<span style="opacity:.75">{html.escape(self.guess_text)}</span></div>'
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Claim(Measurement):
    """A number that a formula predicts, within a tolerance."""

    formula: str = ""
    expected: float = math.nan
    tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the measurement is within the tolerance."""
        return abs(self.measured - self.expected) <= self.tolerance

    @property
    def verdict(self) -> str:
        """Whether the formula agrees with the measurement."""
        return "theory holds ✓" if self.holds else "theory fails ✗"

    @property
    def theory(self) -> str:
        """The formula, its value and the tolerance."""
        value = f"{self.formula} = {self._with_unit(self.expected)}"
        return f"{value} (± {format_number(self.tolerance)})" if self.tolerance else value

    @property
    def is_guess_right(self) -> bool:
        """Whether the guess is within the tolerance of the measurement, or rounds to the same number."""
        if self.guess is None:
            return False
        same = format_number(self.guess) == format_number(self.measured)
        return same or abs(self.measured - self.guess) <= self.tolerance


@dataclasses.dataclass(frozen=True, repr=False)
class Limit(Measurement):
    """A number that must not exceed a limit."""

    limit: float = math.nan

    @property
    def holds(self) -> bool:
        """Whether the measurement is at most the limit."""
        return self.measured <= self.limit

    @property
    def verdict(self) -> str:
        """Whether the limit is kept."""
        return "limit kept ✓" if self.holds else "limit exceeded ✗"

    @property
    def theory(self) -> str:
        """The limit."""
        return f"at most {self._with_unit(self.limit)}"

    @property
    def is_guess_right(self) -> bool:
        """Whether the guess is within a factor of two; next to a 0, whether both are 0 up to rounding."""
        if self.guess is None:
            return False
        small, large = sorted((abs(self.guess), abs(self.measured)))
        return large <= (_CLOSE_FACTOR * small if small else _ROUNDING)


def format_number(number: float) -> str:
    """Return three digits, or all digits of an integer."""
    if float(number).is_integer() and abs(number) < 1e15:
        return f"{number:,.0f}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def parse_number(value: Any, name: str) -> float:
    """Return a Python, NumPy or torch number as float."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    return float(value)


def parse_guess(value: Any, quantity: str) -> float | None:
    """Return a guess as float, or None if the reader made none."""
    if value is None:
        return None
    number = parse_number(value, f"your guess of {quantity!r}")
    if not math.isfinite(number):
        raise ValueError(f"your guess of {quantity!r} is {number}; type a finite number, or None for no guess")
    return number

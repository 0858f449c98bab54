"""Checks of what strategies are given: each error says the value, the rule and the remedy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_count(name: str, value: Any, least: int = 1) -> None:
    """An integer from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}; it must be an integer from {least} up, such as {name}={max(least, 2)}")
    if value < least:
        raise ValueError(f"{name}={value}; it must be at least {least}")


def check_positive(name: str, value: Any) -> None:
    """A finite number above 0, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}; it must be a number above 0, such as {name}=1.0")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value}; it must be a finite number above 0. Leave it out for none")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """One of `choices`, or None."""
    if value is not None and value not in (found := list(choices)):
        raise ValueError(f"{name}={value!r}; it must be one of {', '.join(map(repr, found))}, or left out")

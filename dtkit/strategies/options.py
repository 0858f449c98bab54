"""Checks of the options of strategies: each error names the value, the rule and the remedy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dtkit._util.formatting import name_type

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_count(name: str, value: Any, minimum: int = 1) -> None:
    """Require an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}={value!r}; it must be an integer of at least {minimum}, such as {name}={max(minimum, 2)}"
        )
    if value < minimum:
        raise ValueError(f"{name}={value}; it must be at least {minimum}")


def check_positive(name: str, value: Any) -> None:
    """Require a finite number above 0, or None."""
    if value is not None:
        _check_positive_number(name, value, "Leave it out for none")


def check_rate(name: str, value: Any, example: float) -> None:
    """Require a finite number above 0."""
    _check_positive_number(name, value, f"Usual is {name}={example}")


def _check_positive_number(name: str, value: Any, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}; it must be a number above 0, such as {name}=1.0")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value}; it must be a finite number above 0. {remedy}")


def check_flag(name: str, value: Any) -> None:
    """Require a bool: other values, such as "no", would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}; it must be True or False, such as {name}={bool(value)}")


def check_names(name: str, value: Any) -> tuple[str, ...] | None:
    """Return a list or tuple of names as a tuple, or None; refuse a single string (a list of letters)."""
    if value is None:
        return None
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r}; it must be a list of names, such as {name}=[{value!r}]")
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} is {name_type(value)}; it must be a list of names, such as {name}=['4']")
    names = [str(entry) for entry in value]
    if names != list(value):
        raise TypeError(f"{name}={list(value)!r}; names are strings, such as {name}={names!r}")
    return tuple(value)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Require one of `choices`, or None."""
    if value is not None and value not in (allowed := list(choices)):
        raise ValueError(f"{name}={value!r}; it must be one of {', '.join(map(repr, allowed))}, or left out")

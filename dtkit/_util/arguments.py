"""Misspelled keyword arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_P = ParamSpec("_P")
_R = TypeVar("_R")


def suggest_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method so that the error for an unknown keyword argument names the one that was probably meant."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for unknown in kwargs.keys() - set(names):
            similar = difflib.get_close_matches(unknown, names, n=1)
            hint = f"did you mean {similar[0]}=?" if similar else f"it takes {', '.join(names)}"
            raise TypeError(f"{_describe_call(function, args)}() has no argument {unknown}=; {hint}")
        return function(*args, **kwargs)

    return call


def _describe_call(function: Callable[..., object], args: Sequence[object]) -> str:
    """Return the name by which a user calls a method."""
    owner = type(args[0]).__name__ if args else "Cluster"
    return owner if function.__name__ == "__init__" else f"{owner}.{function.__name__}"

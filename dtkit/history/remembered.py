"""Results that several readers of a history ask for between two of its rows.

A view asks whether the loss diverged for its notices, its state and its verdict, and for the times of the last steps
twice. Each of them took a tenth of a millisecond or more, on cores that the engines need.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.history.history import History

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def remember_last(
    read: Callable[Concatenate[History, _Arguments], _Result],
) -> Callable[Concatenate[History, _Arguments], _Result]:
    """Return a function that computes a result again only for a changed history or other arguments.

    Nobody may change the result.
    """
    return remember_while(_get_version)(read)


def remember_while(
    get_state: Callable[[History], object],
) -> Callable[
    [Callable[Concatenate[History, _Arguments], _Result]], Callable[Concatenate[History, _Arguments], _Result]
]:
    """Return a decorator like :func:`remember_last`, for a result that depends on `get_state(history)` alone."""

    def decorate(
        read: Callable[Concatenate[History, _Arguments], _Result],
    ) -> Callable[Concatenate[History, _Arguments], _Result]:
        known: weakref.WeakKeyDictionary[History, tuple[object, _Result]] = weakref.WeakKeyDictionary()
        # locks: for one look or assignment
        lock = threading.Lock()

        @functools.wraps(read)
        def read_remembered(history: History, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            key = get_state(history), args, kwargs  # as of before the history is read
            with lock:
                before = known.get(history)
            if before is not None and before[0] == key:
                return before[1]
            result = read(history, *args, **kwargs)
            with lock:
                known[history] = key, result
            return result

        return read_remembered

    return decorate


def _get_version(history: History) -> object:
    return history.version

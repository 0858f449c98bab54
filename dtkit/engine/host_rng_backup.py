"""Copy of the states of numpy's and Python's global generators at the beginning of a step.

A copy takes as long as a short step, and few steps draw such numbers. So states are compared in the first two steps,
and between dispatches. As soon as they have changed, each step copies them. If numbers are drawn for the first time in
a dispatch, and a later step of that dispatch fails, its numbers aren't drawn again.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

_WATCHED_STEPS = 2


class HostRngBackup:
    """Copy of the states of numpy's and Python's generators."""

    def __init__(self) -> None:
        self._states: tuple[Any, ...] = ()
        self._has_changed = False
        self._num_watched = 0

    def begin_dispatch(self) -> None:
        """Compare the states with the copy, and copy them."""
        states = _capture()
        self._has_changed |= bool(self._states) and not _are_equal(states, self._states)
        self._states = states

    def save(self) -> None:
        """Copy the states, if steps have changed them."""
        if self._has_changed:
            self._states = _capture()
        elif self._num_watched <= _WATCHED_STEPS:
            self.begin_dispatch()
            self._num_watched += 1

    def restore(self) -> None:
        """Set the generators to the copy."""
        numpy_state, python_state = self._states
        np.random.set_state(numpy_state)  # noqa: NPY002 - users' code draws from the global generator
        random.setstate(python_state)


def _capture() -> tuple[Any, ...]:
    return np.random.get_state(), random.getstate()  # noqa: NPY002 - as above


def _are_equal(states: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    (kind, keys, *rest), python_state = states
    (other_kind, other_keys, *other_rest), other_python_state = other
    is_same_numpy = kind == other_kind and rest == other_rest and bool(np.array_equal(keys, other_keys))
    return is_same_numpy and python_state == other_python_state

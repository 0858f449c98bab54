"""Lines that are equal: the last one would hide the others, so their dashes take turns. The live view does the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

TURN_LENGTH = 6.0
"""Length of a dash of lines that take turns, in widths of a line."""


def find_turns(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[tuple[int, int]]:
    """Return for each line (positions, values) its place among the lines that are equal to it, and their count."""
    groups: list[list[int]] = []
    for k, line in enumerate(lines):
        group = next((each for each in groups if _are_equal(lines[each[0]], line)), None)
        if group is None:
            groups.append([k])
        else:
            group.append(k)
    places = {k: (place, len(group)) for group in groups for place, k in enumerate(group)}
    return [places[k] for k in range(len(lines))]


def choose_turn(place: int, count: int, length: float = TURN_LENGTH) -> tuple[float, tuple[float, float]]:
    """Return (offset, (dash, gap)) with which a line takes its turn among `count` equal ones."""
    return length * (count - place), (length, length * (count - 1))


def _are_equal(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> bool:
    (x, y), (other_x, other_y) = first, second
    if len(x) != len(other_x) or np.isfinite(y).sum() < 2:  # a dot has no dashes
        return False
    return np.array_equal(x, other_x, equal_nan=True) and np.allclose(y, other_y, rtol=1e-6, atol=0, equal_nan=True)

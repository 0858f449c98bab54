"""Steps that a history lacks, between its first step and the run's position."""

from __future__ import annotations

import numpy as np


def find_missing_steps(steps: np.ndarray, stop: int | None = None) -> list[tuple[int, int]]:
    """Return (first, last) of each gap in a history's steps, also before `stop`, where the run is."""
    steps = np.unique(steps)
    if not len(steps):
        return []
    if stop is not None:
        steps = np.append(steps[steps < stop], stop)
    ends = np.flatnonzero(np.diff(steps) > 1)
    return [(int(steps[k]) + 1, int(steps[k + 1]) - 1) for k in ends]


def describe_missing_steps(steps: np.ndarray, stop: int | None = None) -> str:
    """Return the missing steps in words, such as ``steps 1,800 to 1,815``; empty if there are none."""
    gaps = find_missing_steps(steps, stop)
    parts = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in gaps]
    word = "step" if len(gaps) == 1 and gaps[0][0] == gaps[0][1] else "steps"
    return f"{word} {', '.join(parts)}" if parts else ""

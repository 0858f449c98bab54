"""Rows of steps whose phases each take a given time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.history.history import ROW_DTYPE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def make_phase_rows(phases_ms: Sequence[Mapping[str, float]], steps: int) -> np.ndarray:
    """Return rows of `steps` steps, in which each rank takes these milliseconds in each phase."""
    ranks = len(phases_ms)
    rows = np.zeros(steps * ranks, ROW_DTYPE)
    rows["step"], rows["rank"] = np.repeat(np.arange(steps), ranks), np.tile(np.arange(ranks), steps)
    rows["samples"], rows["weight"], rows["loss"] = 64, 64, 1.0
    for rank, phases in enumerate(phases_ms):
        own = rows["rank"] == rank
        for name, milliseconds in phases.items():
            rows[f"{name}_s"][own] = milliseconds / 1e3
        rows["step_s"][own] = sum(phases.values()) / 1e3
    return rows

"""Mean loss of some steps. The loss of a single step is mostly noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit.history.growing_array import select_rows

if TYPE_CHECKING:
    import numpy as np

    from dtkit.history.history import History

FINAL_LOSS_STEPS = 20
"""Steps over which the final loss is averaged."""


def select_known(totals: np.ndarray) -> np.ndarray:
    """Return the steps that have a loss. Others have no samples, or no stage that computes one."""
    return select_rows(totals, totals["weight"] != 0)


def compute_mean_loss(totals: np.ndarray) -> float:
    """Return the mean loss of some steps by weight; NaN without one. `totals` are those of a history."""
    known = select_known(totals)
    return float((known["loss"] * known["weight"]).sum() / known["weight"].sum()) if len(known) else math.nan


def count_final_steps(history: History) -> int:
    """Return the number of steps over which the final loss of a history is averaged: fewer in a short one."""
    return min(FINAL_LOSS_STEPS, history.num_steps)


def read_final_loss(history: History) -> float:
    """Return the mean loss of the last steps by weight, which all views show; NaN before the first step."""
    return compute_mean_loss(history.read_valid_totals(history.num_steps - count_final_steps(history)))

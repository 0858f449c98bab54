"""Mean loss of some steps. The loss of a single step is mostly noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

FINAL_LOSS_STEPS = 20
"""Steps over which the final loss is averaged."""


def compute_mean_loss(totals: np.ndarray) -> float:
    """Return the mean loss of some steps by weight; NaN without one. `totals` are those of a history."""
    known = totals[totals["weight"] != 0]  # the others have no samples, or no stage with a loss
    return float((known["loss"] * known["weight"]).sum() / known["weight"].sum()) if len(known) else math.nan

"""Rows of a history over all ranks: one for each step."""

from __future__ import annotations

import numpy as np

TOTAL_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("ranks", "i4"),
        ("samples", "i8"),
        ("loss", "f8"),  # weighted mean; NaN without a weight
        ("weight", "f8"),
        ("step_s", "f8"),  # the slowest rank's
        ("wait_s", "f8"),  # summed over the ranks, as are the bytes
        ("sent_bytes", "i8"),
        ("grad_norm", "f8"),  # the largest over the ranks
    ]
)
"""Row of one step over all ranks."""


def sum_over_ranks(block: np.ndarray) -> np.ndarray:
    """Return the totals of a block that is sorted by step."""
    steps, first, count = np.unique(block["step"], return_index=True, return_counts=True)
    total = np.zeros(len(steps), TOTAL_DTYPE)
    if not len(steps):
        return total
    total["step"], total["ranks"] = steps, count
    total["samples"] = np.add.reduceat(block["samples"].astype("i8"), first)
    total["weight"] = np.add.reduceat(block["weight"], first)
    # A rank without a sample reports NaN with weight 0, which the mean must ignore.
    weighted = np.where(block["weight"] != 0, block["loss"] * block["weight"], 0.0)
    loss, weight = np.add.reduceat(weighted, first), total["weight"]
    total["loss"] = np.divide(loss, weight, out=np.full(len(total), np.nan), where=weight != 0)
    total["step_s"] = np.maximum.reduceat(block["step_s"].astype("f8"), first)
    total["wait_s"] = np.add.reduceat(block["wait_s"].astype("f8"), first)
    total["sent_bytes"] = np.add.reduceat(block["sent_bytes"], first)
    total["grad_norm"] = np.fmax.reduceat(block["grad_norm"].astype("f8"), first)
    return total

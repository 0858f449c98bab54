"""Estimate of the time that one process would compute for a batch that several nodes share.

One process computes all rows, and so at most as often the time of one node's rows as there are nodes. It takes less
where a part of the time doesn't grow with the rows. Shorter steps show that part, such as the last one of each epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dtkit.history.history import History

_MAX_ROWS = 4000
"""Latest rows of the history that are read: a view asks again and again."""
_MIN_SHORT_ROWS = 4


def estimate_growth(history: History, num_nodes: int) -> tuple[float, bool]:
    """Return by how much computing grows from one node's rows to all rows, and whether shorter steps have shown it.

    Without shorter steps, that is the number of nodes, which is the most that it can be.
    """
    rows = history.rows(len(history) - _MAX_ROWS)
    samples, seconds = rows["samples"].astype(float), (rows["forward_s"] + rows["backward_s"]).astype(float)
    usual = float(np.median(samples)) if len(samples) else 0.0
    is_short, is_usual = (samples > 0) & (samples <= usual / 2), np.abs(samples - usual) <= 0.1 * usual
    if is_short.sum() < _MIN_SHORT_ROWS or not is_usual.any():
        return float(num_nodes), False
    short, short_s = float(np.median(samples[is_short])), float(np.median(seconds[is_short]))
    usual_s = float(np.median(seconds[is_usual]))
    if not 0 < short_s < usual_s:
        return 1.0, True
    slope = (usual_s - short_s) / (usual - short)
    return min(float(num_nodes), 1 + slope * usual * (num_nodes - 1) / usual_s), True

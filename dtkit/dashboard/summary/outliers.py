"""Which of many nodes are worth a name: the lost, those that keep the others waiting, and who is far from the rest.

Far is measured in robust standard deviations (1.4826 times the median absolute deviation, Rousseeuw and Croux, JASA
1993), which a few odd nodes can't stretch. Of 256 nodes that differ by normal chance alone none is beyond ``FAR`` in a
thousand looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.summary.curves import MAX_NODE_LINES

if TYPE_CHECKING:
    from collections.abc import Collection

    from dtkit.dashboard.summary.metrics import RunMetrics

MAX_OUTLIERS = 4
"""Outliers at most: more names can't be told apart at the edge of a chart."""

MIN_DEVIATIONS = 6.0
_MIN_RELATIVE_SPREAD = 0.02  # of the median: nodes that differ by less are alike, however narrow the others lie


def find_outliers(metrics: RunMetrics, lost_ranks: Collection[int] = ()) -> list[int]:
    """Ranks, the most remarkable first; none where each node has a line of its own anyway."""
    if len(metrics.by_rank) <= MAX_NODE_LINES:
        return []
    slow = metrics.timing.straggler.ranks if metrics.timing.straggler else ()
    far = np.maximum(_measure_deviations(metrics.by_rank[:, 0]), _measure_deviations(metrics.by_rank[:, 1]))
    odd = [int(rank) for rank in np.argsort(-far, kind="stable")[:MAX_OUTLIERS] if far[rank] > MIN_DEVIATIONS]
    return list(dict.fromkeys([*sorted(lost_ranks), *slow, *odd]))[:MAX_OUTLIERS]


def _measure_deviations(values: np.ndarray) -> np.ndarray:
    """How far each is from the median; 0 for what is not finite."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros(len(values))
    middle = float(np.median(known))
    spread = max(
        1.4826 * float(np.median(np.abs(known - middle))), _MIN_RELATIVE_SPREAD * abs(middle) / MIN_DEVIATIONS, 1e-12
    )
    return np.nan_to_num(np.abs(values - middle) / spread, nan=0.0, posinf=0.0)

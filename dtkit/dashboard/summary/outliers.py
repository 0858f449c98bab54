"""Outliers among many nodes: lost nodes, stragglers, and nodes far from the median.

Distance is measured in robust standard deviations, which a few outliers don't change. One is 1.4826 times the median
absolute deviation (Rousseeuw and Croux, JASA 1993).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.summary.curves import MAX_NODE_LINES

if TYPE_CHECKING:
    from collections.abc import Collection

    from dtkit.dashboard.summary.metrics import RunMetrics

MAX_OUTLIERS = 4
"""Largest number of outliers: more names don't fit at the edge of a chart."""

MIN_DEVIATIONS = 6.0
"""Distance of an outlier from the median. Normal noise practically never exceeds it among 256 nodes."""

_MIN_RELATIVE_SPREAD = 0.02  # of the median; nodes that differ by less are alike


def find_outliers(metrics: RunMetrics, lost_ranks: Collection[int] = ()) -> list[int]:
    """Return the ranks of outliers, the most important first; empty if the chart draws every node."""
    if len(metrics.by_rank) <= MAX_NODE_LINES:
        return []
    slow = metrics.timing.straggler.ranks if metrics.timing.straggler else ()
    losses, throughputs, _ = metrics.by_rank.T
    deviations = np.maximum(_measure_deviations(losses), _measure_deviations(throughputs))
    distant = [
        int(rank) for rank in np.argsort(-deviations, kind="stable")[:MAX_OUTLIERS] if deviations[rank] > MIN_DEVIATIONS
    ]
    return list(dict.fromkeys([*sorted(lost_ranks), *slow, *distant]))[:MAX_OUTLIERS]


def _measure_deviations(values: np.ndarray) -> np.ndarray:
    """Return the distance of each value from the median; 0 for values that are not finite."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.zeros(len(values))
    median = float(np.median(finite))
    spread = max(
        1.4826 * float(np.median(np.abs(finite - median))), _MIN_RELATIVE_SPREAD * abs(median) / MIN_DEVIATIONS, 1e-12
    )
    return np.nan_to_num(np.abs(values - median) / spread, nan=0.0, posinf=0.0)

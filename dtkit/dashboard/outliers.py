"""Which of many nodes are worth a name: the lost, those that keep the others waiting, and who is far from the rest.

Far is measured in robust standard deviations (1.4826 times the median absolute deviation, Rousseeuw and Croux, JASA
1993), which a few odd nodes can't stretch. Of 256 nodes that differ by normal chance alone none is beyond ``FAR`` in a
thousand looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.series import MAX_LINES

if TYPE_CHECKING:
    from collections.abc import Collection

    from dtkit.dashboard.glance import Glance

MOST = 4
"""Outliers at most: more names can't be told apart at the edge of a chart."""

FAR = 6.0
_LEAST = 0.02  # of the median: nodes that differ by less are alike, however narrow the others lie


def outliers(now: Glance, lost: Collection[int] = ()) -> list[int]:
    """Ranks, the most remarkable first; none where each node has a line of its own anyway."""
    if len(now.by_rank) <= MAX_LINES:
        return []
    slow = now.timing.straggler.ranks if now.timing.straggler else ()
    far = np.maximum(_distance(now.by_rank[:, 0]), _distance(now.by_rank[:, 1]))
    odd = [int(rank) for rank in np.argsort(-far, kind="stable")[:MOST] if far[rank] > FAR]
    return list(dict.fromkeys([*sorted(lost), *slow, *odd]))[:MOST]


def _distance(values: np.ndarray) -> np.ndarray:
    """How far each is from the median; 0 for what is not finite."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros(len(values))
    middle = float(np.median(known))
    spread = max(1.4826 * float(np.median(np.abs(known - middle))), _LEAST * abs(middle) / FAR, 1e-12)
    return np.nan_to_num(np.abs(values - middle) / spread, nan=0.0, posinf=0.0)

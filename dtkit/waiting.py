"""How much of the time that ranks were blocked in collectives they waited for each other.

Of a collective only each rank's begin and end are needed. It can't move before the last rank is there, so rank i waits
from its own begin to the latest one, wait_i = max_j begin_j - begin_i, and the rest of its time is transfer. The rank
that waits least is the one that the others wait for.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def split(blocked: Sequence[np.ndarray], offsets: Sequence[float] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(waiting, transfer) in seconds, each of shape (ranks, steps).

    `blocked` has for each rank an array (steps, collectives, 2) of begin and end on that rank's clock, NaN where a
    step had fewer; `offsets` is how far each rank's clock is ahead (all equal by default, as on one host).
    """
    places = max(spans.shape[1] for spans in blocked)
    times = np.stack([_padded(spans, places) for spans in blocked])
    if offsets is not None:
        times = times - np.asarray(offsets)[:, None, None, None]
    begin, end = times[..., 0], times[..., 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a place that no rank used is NaN throughout
        latest = np.nanmax(begin, axis=0)
    waiting = np.clip(np.minimum(latest, end) - begin, 0, None)
    return np.nansum(waiting, axis=2), np.nansum(np.clip(end - begin - waiting, 0, None), axis=2)


def _padded(spans: np.ndarray, places: int) -> np.ndarray:
    return np.pad(spans, ((0, 0), (0, places - spans.shape[1]), (0, 0)), constant_values=np.nan)

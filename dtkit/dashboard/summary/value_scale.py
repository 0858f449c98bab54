"""Which scale an axis of values has, as ``static/chart/grain.js`` chooses it for the live view."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dtkit.dashboard.summary.curves import CurveBuckets

_STEEP_RATIO = 50.0  # from this ratio of the losses of several runs on, an axis is logarithmic
_MANY_ORDERS = 200.0
"""Ratio of values from which a panel of one run becomes logarithmic by itself.

From there on, the smallest values are less than a pixel above 0 on a linear axis.
"""
_NUM_BLOCKS = 16
_LOG_ROOM = 4.0  # times below the lowest part of a line


def is_steep(losses: np.ndarray, ratio: float = _STEEP_RATIO) -> bool:
    """Return whether losses are so different that a linear axis would hide the smaller ones.

    None of them is negative. Zeros don't count: they have no place on a logarithmic axis.
    """
    known = losses[np.isfinite(losses)]
    positive = known[known > 0]
    return bool(len(positive) and known.min() >= 0 and positive.max() / positive.min() >= ratio)


def spans_orders(curve: np.ndarray) -> bool:
    """Return whether a linear axis would hide the smaller values of a curve of (smallest, mean, largest).

    Small values are means of some buckets, as in the live view: a single one is often small by chance.
    """
    if not len(curve) or np.isnan(curve[:, 1]).all():
        return False
    return spans_orders_of([curve[:, 1]])


def spans_orders_of(lines: Sequence[np.ndarray]) -> bool:
    """Return whether a linear axis would hide the smaller values of some lines; NaN where one has no value."""
    ends: list[float] = []
    for line in lines:
        if (line < 0).any():
            return False
        ends += [float(block.mean()) for block in _split_positive(line)]
        ends.append(float(np.nanmax(line, initial=0.0)))
    return is_steep(np.array(ends), _MANY_ORDERS)


def lift_bands(buckets: CurveBuckets) -> CurveBuckets:
    """Return buckets whose bands end at the smallest positive value, if their axis is logarithmic.

    A value of 0 has no place there, and its band would reach the bottom of the chart.
    """
    values = buckets.values
    if not spans_orders(values[:, -1]):
        return buckets
    low, mean = values[..., 0], values[..., 1]
    edges = np.stack([low, mean])
    least = edges[edges > 0].min()
    lifted = np.where((low <= 0) & (mean > 0), least, low)
    return dataclasses.replace(buckets, values=np.concatenate([lifted[..., None], values[..., 1:]], axis=-1))


def find_log_floor(lines: Iterable[np.ndarray]) -> float | None:
    """Return down to where a logarithmic axis has to show lines; None without a positive value.

    It is a little below the lowest part of a line, and not above its last value. Single small values would take an axis
    down by orders, and leave its upper third to the line.
    """
    ends: list[float] = []
    for line in lines:
        ends += [float(np.exp(np.log(block).mean())) / _LOG_ROOM for block in _split_positive(line)]
        ends += line[line > 0][-1:].tolist()
    return min(ends, default=None)


def _split_positive(line: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the positive values of each part of a line that has some."""
    edges = np.arange(1, _NUM_BLOCKS) * len(line) // _NUM_BLOCKS
    for block in np.split(line, edges):
        if (block > 0).any():
            yield block[block > 0]

"""Number of samples that each shard gives to each step: index arithmetic, without torch.

All counts follow from one total order. Row j of a shard with s rows has the key (j + 1/2) / s. This is the time in the
epoch, from 0 to 1, at which an evenly read shard reaches that row's middle. A step takes the next `batch_size` rows in
the order of keys; ties go by shard. So each step is full and can be computed alone. Each shard gives in proportion to
its size, and all shards end together. Comparisons are exact, in integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def count_cumulative_samples(sizes: Sequence[int], num_taken: np.ndarray) -> np.ndarray:
    """Return how many of the first samples of an epoch each shard has given; int64, (len(num_taken), ranks).

    `sizes` has the rows of each shard, up to 1e9 together, and `num_taken` totals from 0 to their sum, in any order.
    """
    size = np.asarray(sizes, dtype=np.int64)
    result = np.zeros((len(num_taken), len(size)), dtype=np.int64)
    holders = np.flatnonzero(size)
    if len(holders):
        result[:, holders] = _count_lower_keys(size[holders], np.asarray(num_taken, dtype=np.int64))
    return result


def _count_lower_keys(size: np.ndarray, num_taken: np.ndarray) -> np.ndarray:
    """Return how many of each shard's keys are among the `num_taken` smallest of all.

    Rounding num_taken * size / n counts the keys up to num_taken / n. These are the smallest keys too, and their number
    is wrong by at most half the number of shards. The difference is then corrected key by key.
    """
    n = int(size.sum())
    target = num_taken[:, None]
    result: np.ndarray = (2 * target * size + n) // (2 * n)
    missing = num_taken - result.sum(axis=1)
    for direction in (1, -1):
        rows = np.flatnonzero(missing * direction > 0)
        while len(rows):
            shard = _find_nearest_shard(result[rows], num_taken[rows], size, n, direction)
            result[rows, shard] += direction
            missing[rows] -= direction
            rows = rows[missing[rows] != 0]
    return result


def _find_nearest_shard(
    num_held: np.ndarray, num_taken: np.ndarray, size: np.ndarray, n: int, direction: int
) -> np.ndarray:
    """Return the shard with the smallest key not held (`direction` 1) or the largest key held (-1), for each row.

    The distance of a key from num_taken / n is a / (2 n s) with an integer `a`; the smallest a / s wins. Two such
    fractions differ by at least 1e-18, because shards have at most 1e9 rows. So 60 binary digits after the point
    distinguish them, and the integer part needs a second number.
    """
    a = direction * ((2 * num_held + direction) * n - 2 * num_taken[:, None] * size)
    whole, rest = np.divmod(a, size)
    upper, rest = np.divmod(rest << 30, size)
    lower = (rest << 30) // size
    fraction = (upper << 30) | lower
    fraction[whole != whole.min(axis=1, keepdims=True)] = np.iinfo(np.int64).max
    if direction == 1:  # equal keys are in the order of shards
        return np.asarray(fraction.argmin(axis=1))
    return len(size) - 1 - np.asarray(fraction[:, ::-1].argmin(axis=1))

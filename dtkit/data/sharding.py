"""Division of rows among ranks: index arithmetic, without torch."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTITION_METHODS = ("contiguous", "strided", "stratified")
"""Ways to divide rows: blocks, one row to each rank in turn, or every class spread over all ranks."""

Shard = range | np.ndarray
"""Rows of one rank: a range if possible, else 32-bit integers."""
_MAX_ROWS = 2**30  # limit of the 64-bit integers of `count_cumulative_samples`


def partition_rows(
    n: int,
    ranks: int,
    *,
    by: str = "contiguous",
    weights: Sequence[float] | None = None,
    labels: Any = None,
    seed: int | None = None,
) -> list[np.ndarray]:
    """Divide the rows 0 to n - 1 into disjoint shards, and return each rank's rows (int64).

    Sizes differ by at most one, or are in proportion to `weights` (largest remainder, at least one row each). `seed`
    permutes the rows first. Equal arguments give equal shards. Raises ValueError for invalid arguments.
    """
    shards = build_shards(n, ranks, by=by, weights=weights, labels=labels, seed=seed)
    return [np.asarray(shard, dtype=np.int64) for shard in shards]


def to_index(shard: Shard) -> Any:
    """Return an index that selects the rows of an array, a slice if possible."""
    return slice(shard.start, shard.stop, shard.step) if isinstance(shard, range) else shard


def build_shards(
    n: int, ranks: int, *, by: str, weights: Sequence[float] | None, labels: Any, seed: int | None
) -> list[Shard]:
    """Return the shards of :func:`partition_rows` in the form that takes least memory."""
    _check_arguments(n, ranks, by, seed)
    if by == "stratified" and labels is None:
        raise ValueError(
            "by='stratified' needs labels: it spreads every class over all ranks. Give labels=, one per row."
        )
    sizes = _compute_sizes(n, ranks, weights)
    order = None if seed is None else _permute_rows(n, seed)
    if by == "speed" and weights is None:
        raise ValueError("by='speed' needs measured speeds; use cluster.partition(data, by='speed', model=...).")
    if by in ("contiguous", "speed"):
        ends = np.cumsum([0, *sizes]).tolist()
        return [_select_rows(order, range(start, stop)) for start, stop in itertools.pairwise(ends)]
    if by == "strided":
        dealt = _distribute_positions(n, sizes, weighted=weights is not None)
        return [_select_rows(order, positions) for positions in dealt]
    return _order_by_class(check_labels(labels, n), sizes, order, weighted=weights is not None)


def _check_arguments(n: int, ranks: int, by: str, seed: int | None) -> None:
    known = (*PARTITION_METHODS, "speed")
    if by not in known:
        raise ValueError(f"by={by!r} is not a way to divide rows. Use one of {', '.join(map(repr, known))}.")
    if ranks < 1:
        raise ValueError(f"there are {ranks} ranks, but there must be at least one. Start an engine.")
    if not n:
        raise ValueError(f"the data has no samples. Give at least one for each of the {ranks} ranks")
    if n < ranks:
        raise ValueError(
            f"{n} samples don't suffice for {ranks} ranks: each rank needs at least one. Give more samples, "
            f"or use at most {n} engines."
        )
    if n > _MAX_ROWS:
        raise ValueError(f"{n} rows are more than {_MAX_ROWS} (2**30), the limit. Group rows first.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0):
        raise ValueError(f"seed={seed!r} is not a seed: it must be an integer from 0 up, or None. Use seed=0.")


def _compute_sizes(n: int, ranks: int, weights: Sequence[float] | None) -> list[int]:
    if weights is None:
        return [n // ranks + (rank < n % ranks) for rank in range(ranks)]
    return _round_by_largest_remainder(n, _check_weights(weights, ranks))


def _check_weights(weights: Sequence[float], ranks: int) -> list[Fraction]:
    values = [float(weight) for weight in weights]
    if len(values) != ranks:
        raise ValueError(f"{len(values)} weights for {ranks} ranks: there must be one per rank. Give {ranks} weights.")
    for rank, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"weights[{rank}]={value} is not a share: every weight must be a finite number above 0. To "
                f"leave a rank out, start fewer engines."
            )
    return [Fraction(value) for value in values]


def _round_by_largest_remainder(n: int, weights: list[Fraction]) -> list[int]:
    """Return proportional parts of n in whole rows; a part of 0 takes a row from the largest."""
    total = sum(weights)
    parts = [n * weight / total for weight in weights]
    sizes = [math.floor(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda rank: sizes[rank] - parts[rank])
    for rank in by_remainder[: n - sum(sizes)]:
        sizes[rank] += 1
    for rank in [rank for rank, size in enumerate(sizes) if size == 0]:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[rank] = 1
    return sizes


@functools.lru_cache(maxsize=64)
def divide_evenly(n: int, parts: int) -> list[int]:
    """Return the sizes of `parts` parts of n, which differ by at most one; the larger ones come first."""
    return [n // parts + (part < n % parts) for part in range(parts)]


def divide_proportionally(n: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Divide `n` samples in proportion to positive shares; each part gets at least one if there are enough."""
    if n < len(shares):
        return tuple(int(rank < n) for rank in range(len(shares)))
    return tuple(_round_by_largest_remainder(n, [Fraction(share) for share in shares]))


def _permute_rows(n: int, seed: int) -> np.ndarray:
    order: np.ndarray = np.random.default_rng(seed).permutation(np.arange(n, dtype=np.int32))
    return order


def _select_rows(order: np.ndarray | None, positions: Shard) -> Shard:
    """Return a copy of the rows at `positions` of the permuted order."""
    return positions if order is None else order[to_index(positions)].copy()


def _distribute_positions(n: int, sizes: list[int], *, weighted: bool) -> list[Shard]:
    """Divide the positions 0 to n - 1 evenly: in turn, or by the keys of :mod:`dtkit.data.step_counts`."""
    if not weighted:
        return [range(rank, n, len(sizes)) for rank in range(len(sizes))]
    keys = np.concatenate([(2 * np.arange(size) + 1) / (2 * size) for size in sizes])
    turns = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(keys, kind="stable")]
    return [np.flatnonzero(turns == rank).astype(np.int32) for rank in range(len(sizes))]


def _order_by_class(labels: np.ndarray, sizes: list[int], order: np.ndarray | None, *, weighted: bool) -> list[Shard]:
    """Sort rows by class and divide them evenly, which spreads each class evenly too."""
    codes = np.unique(labels, return_inverse=True)[1]
    by_class = np.argsort(codes if order is None else codes[order], kind="stable").astype(np.int32)
    shards = []
    for positions in _distribute_positions(len(labels), sizes, weighted=weighted):
        # In the original order, a rank has no long runs of one class.
        held = np.sort(by_class[to_index(positions)])
        shards.append(_select_rows(order, held))
    return shards


def check_labels(labels: Any, n: int) -> np.ndarray:
    """Return labels as an array. Raises ValueError unless there is one for each row."""
    array = np.asarray(labels)
    if array.ndim != 1 or len(array) != n:
        raise ValueError(
            f"labels of shape {array.shape} don't fit {n} rows: there must be one label per row. Give a "
            f"one-dimensional array of {n} labels."
        )
    return array

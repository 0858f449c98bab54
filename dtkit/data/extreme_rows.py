"""The rows of whole arrays that a model or loss refuses first, though the first rows are fine.

Label 10 of ten classes, an index beyond an embedding, or a NaN are seldom among the first rows. The smallest and the
largest whole number of each array, and its first number that is not finite, are found in a fraction of a second. A
trial of these rows shows whether model and loss take them, as some do: a loss may ignore labels, a model mask NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_BYTES = 256 * 2**20
"""Bytes of arrays that are searched: about 30 ms for floats and 60 ms for whole numbers, of one core."""


def find_extreme_rows(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the numbers of these rows, in order. Smaller arrays are searched first; the largest may be left out."""
    rows: set[int] = set()
    left = _MAX_BYTES
    for tensor in sorted(tensors, key=lambda tensor: tensor.nbytes):
        left -= tensor.nbytes
        if left < 0:
            break
        if tensor.numel() and tensor.device.type == "cpu":
            rows.update(_find_rows(tensor))
    return sorted(rows)


def _find_rows(tensor: torch.Tensor) -> list[int]:
    if tensor.is_floating_point():
        row = find_not_finite(tensor)
        return [] if row is None else [row]
    if tensor.is_complex() or tensor.dtype is torch.bool:
        return []
    numbers = tensor.numpy()
    return [int(index) // (numbers.size // len(numbers)) for index in (numbers.argmin(), numbers.argmax())]


def find_not_finite(tensor: torch.Tensor) -> int | None:
    """Return the first row with NaN or infinity; None if all numbers are finite. A sum shows that in one pass."""
    if bool(torch.isfinite(tensor.sum())):
        return None
    is_finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(1)
    return None if bool(is_finite.all()) else int(is_finite.int().argmin())


def complete_rows(rows: Sequence[int], num_rows: int) -> np.ndarray:
    """Return these rows, and as many of the first rows as make a batch of `num_rows`."""
    others = [row for row in range(num_rows) if row not in rows]
    return np.array([*rows, *others[: max(0, num_rows - len(rows))]], np.int32)

"""Items of a stream that are whole batches: detecting them, and splitting them into samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def count_common_rows(item: Any) -> int | None:
    """Return the number of rows of all tensors of an item; None if they differ, or if a value has none."""
    lengths = {len(value) if _has_rows(value) else None for value in _list_values(item)}
    return lengths.pop() if len(lengths) == 1 else None


def split_rows(batch: Any) -> list[Any]:
    """Return the samples of a batch: a dict, tuple or list of tensors or arrays with a row for each."""
    num_rows = count_common_rows(batch)
    if num_rows is None:
        raise ValueError(
            "the stream yields whole batches, and this one has parts with different numbers of rows "
            f"({', '.join(_describe(value) for value in _list_values(batch))}). Yield samples instead"
        )
    return [_take_row(batch, row) for row in range(num_rows)]


def _list_values(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    return list(item) if isinstance(item, (tuple, list)) else [item]


def _has_rows(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def _take_row(batch: Any, row: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: value[row] for name, value in batch.items()}
    return tuple(value[row] for value in batch) if isinstance(batch, (tuple, list)) else batch[row]

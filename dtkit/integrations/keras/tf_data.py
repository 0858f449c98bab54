"""Datasets of `tf.data`, read once into arrays. Their rows are then partitioned like any others; none is dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dtkit.dashboard.text.progress import show_progress


@dataclasses.dataclass(frozen=True)
class TfRows:
    """Rows of a `tf.data.Dataset`."""

    arrays: tuple[np.ndarray, ...]
    """Inputs, then the target."""
    batch_size: int | None
    """Size of its batches; None for a dataset of single rows."""


def is_tf_dataset(data: Any) -> bool:
    """Return whether this is a `tf.data.Dataset`."""
    return type(data).__module__.startswith("tensorflow.") and hasattr(data, "as_numpy_iterator")


def read_tf_dataset(dataset: Any, batch_rank: int | None) -> TfRows:
    """Return all rows of a finite dataset. Raises ValueError for one without end.

    batch_rank : number of dimensions of a batch of inputs; None if the model doesn't say.
    """
    import tensorflow as tf

    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the tf.data.Dataset never ends, so it has no rows to partition. Give it take(n), or a function that "
            "yields its numpy batches on each engine: lambda: make_dataset().as_numpy_iterator(), with steps="
        )
    is_batched = _is_batched(dataset, batch_rank)
    with show_progress("reading the tf.data.Dataset"):
        items = [tf.nest.flatten(item) for item in dataset.as_numpy_iterator()]
    if not items:
        raise ValueError("the tf.data.Dataset has no rows")
    join = np.concatenate if is_batched else np.stack
    columns = zip(*items, strict=True)
    return TfRows(tuple(join(column) for column in columns), len(items[0][0]) if is_batched else None)


def _is_batched(dataset: Any, batch_rank: int | None) -> bool:
    """Return whether each item is a batch. Without `batch_rank`, parts with the same leading dimension make a batch."""
    import tensorflow as tf

    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    if batch_rank is not None and shapes[0].rank is not None:
        return bool(shapes[0].rank >= batch_rank)
    return all(shape.rank for shape in shapes) and len({shape[0] for shape in shapes}) == 1

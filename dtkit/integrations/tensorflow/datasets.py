"""Datasets of `tf.data`, divided among the ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch.distributed as dist

from dtkit._util.formatting import name_type


def shard_dataset(dataset: Any, batch_size: int) -> Any:
    """Return this rank's batches of a `tf.data.Dataset` of single rows. No row is lost.

    Each step takes `batch_size` rows over all ranks, so all ranks have equally many batches. A rank's last batch may
    have fewer rows than another's, or none. Give their number to the gradient tape as ``samples=``. Transform rows
    after this function, so that each rank transforms only its own ones.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"dataset is {name_type(dataset)}; give a tf.data.Dataset of single rows")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if batch_size < world_size:
        raise ValueError(
            f"batch_size={batch_size} is the number of rows over all {world_size} ranks; give at least that"
        )

    def take_own(*parts: Any) -> Any:
        own = tf.nest.map_structure(lambda part: part[rank::world_size], parts)
        return own if len(own) > 1 else own[0]

    return dataset.batch(batch_size).map(take_own)

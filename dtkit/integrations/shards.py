"""The rows of a partition that an engine holds, as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


def read_shard(key: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the columns of this engine's shard, and its row numbers. `key` is the key of a partition's source."""
    import torch.distributed as dist

    from dtkit.engine.session import get_session

    source, shards = get_session().state.get_data(key)
    rows = np.asarray(shards.get_rows(dist.get_rank()))
    return [np.asarray(column) for column in _to_sequence(source.take(rows))], rows


def _to_sequence(batch: Any) -> Sequence[Any]:
    if isinstance(batch, dict):
        raise TypeError(
            f"the partition has the columns {', '.join(batch)}; give arrays in order, as in partition((X, y))"
        )
    return batch if isinstance(batch, (tuple, list)) else (batch,)

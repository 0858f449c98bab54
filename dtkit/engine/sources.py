"""Where an engine's rows come from: anything whose rows can be taken by index, behind one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Source(Protocol):
    """Rows that can be taken by index."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Any:
        """A batch of these rows, on the CPU."""


class ArraySource:
    """Equally long tensors; a batch is the tuple of their rows."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)

    def __len__(self) -> int:
        return len(self._tensors[0])

    @property
    def targets(self) -> torch.Tensor:
        """The last array."""
        return self._tensors[-1]

    def take(self, rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """One `index_select` a tensor."""
        index = torch.from_numpy(rows)
        return tuple(t.index_select(0, index) for t in self._tensors)


class DatasetSource:
    """A map-style torch Dataset; a batch is what torch's default collation makes of its samples."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, rows: np.ndarray) -> Any:
        """Samples one by one, or through the dataset's own `__getitems__`, collated."""
        from torch.utils.data import default_collate

        index = rows.tolist()
        many = getattr(self._dataset, "__getitems__", None)
        samples = many(index) if many is not None else [self._dataset[k] for k in index]
        batch = default_collate(samples)
        return tuple(batch) if isinstance(batch, list) else batch


def as_source(data: Any) -> Source:
    """Arrays, a tuple of arrays, a TensorDataset or a map-style Dataset, as a Source."""
    if isinstance(data, (np.ndarray, torch.Tensor)):
        data = (data,)
    if isinstance(data, torch.utils.data.TensorDataset):
        data = data.tensors
    if isinstance(data, (tuple, list)):
        return ArraySource([torch.as_tensor(a) for a in data])
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data)
    raise TypeError(
        f"data is a {type(data).__name__}; it must be a tuple of arrays or a map-style Dataset "
        "(with __len__ and __getitem__), or a function that returns one of these"
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of any nesting, on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [to_device(v, device) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # a namedtuple, or not
    return batch

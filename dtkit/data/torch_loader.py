"""Settings of a user's torch DataLoader. dtkit adopts them, since engines make their own batches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util.formatting import name_type

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """Settings of a DataLoader, as the arguments of :meth:`dtkit.Cluster.train`."""

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    """None for torch's default collation."""
    num_workers: int
    shuffle: str | None
    """"shard" for a DataLoader with ``shuffle=True``, None for rows in their order."""
    sampler: Any
    """A sampler of the user's own, or None."""
    drop_last: bool = False
    """Whether an incomplete last batch of each epoch is left out."""
    replaces_sampler: bool = False
    """Whether the DataLoader's DistributedSampler is left out, because dtkit divides the rows."""

    def __str__(self) -> str:
        order = "a sampler" if self.sampler is not None else "rows in order" if self.shuffle is None else "shuffled"
        collation = "" if self.collate_fn is None else ", its collate_fn"
        workers = f", num_workers={self.num_workers} on each rank" if self.num_workers else ""
        title = f"{type(self.dataset).__name__}, batch_size={self.batch_size} over all ranks"
        last = ", without an incomplete last batch" if self.drop_last else ""
        parts = "; dtkit divides all rows over the ranks itself, without the DistributedSampler"
        return f"{title}, {order}{collation}{workers}{last}{parts if self.replaces_sampler else ''}"


def is_data_loader(data: Any) -> bool:
    """Return whether this is a torch DataLoader, without importing torch."""
    return not isinstance(data, type) and any(
        kind.__name__ == "DataLoader" and kind.__module__.startswith("torch.") for kind in type(data).__mro__
    )


def read_data_loader(loader: Any) -> LoaderSettings:
    """Return the settings of a DataLoader. Raises ValueError for one whose batches dtkit can't make."""
    from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, TensorDataset, default_collate

    if loader.batch_size is None:
        raise ValueError(
            "the DataLoader has batch_size=None or a batch_sampler of its own, so dtkit can't split its batches over "
            "ranks. Give its dataset with batch_size= (and sampler=, an iterable of row numbers)"
        )
    collate_fn = None if loader.collate_fn is default_collate else loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        return LoaderSettings(loader.dataset, loader.batch_size, collate_fn, 0, "shard", None, loader.drop_last)
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"the DataLoader has {name_type(loader.batch_sampler)}, so dtkit can't split its batches over ranks. "
            "Give its dataset with batch_size= (and sampler=, an iterable of row numbers)"
        )
    shuffle, sampler = _read_sampler(loader.sampler)
    has_plain_rows = type(loader.dataset) is TensorDataset and collate_fn is None  # a worker would only delay copying
    num_workers = 0 if has_plain_rows else loader.num_workers
    return LoaderSettings(
        loader.dataset,
        loader.batch_size,
        collate_fn,
        num_workers,
        shuffle,
        sampler,
        loader.drop_last,
        type(loader.sampler) is DistributedSampler,
    )


def _read_sampler(sampler: Any) -> tuple[str | None, Any]:
    """Return (`shuffle`, the sampler that remains). dtkit's own order takes the place of torch's samplers."""
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    if type(sampler) is SequentialSampler:
        return None, None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return "shard", None
    if type(sampler) is DistributedSampler:  # it gives each rank its part, as dtkit does
        return ("shard" if sampler.shuffle else None), None
    return "shard", sampler

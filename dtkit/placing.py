"""Data on its way to the engines: what a user may give, and where it then lies.

Arrays and Datasets are taken apart once and put where every engine of this host maps the same bytes
(:mod:`dtkit.shared`); on several hosts they go to rank 0 and from there by broadcast. A function is called on each
engine instead. The file has no name any more once every engine has mapped it, so the system frees it with the last
of them, in whatever way that ends.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit import units
from dtkit.dashboard.progress import waiting
from dtkit.partition import Partition, categorical

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster import Cluster


class Placed:
    """Data that lies on the engines of `cluster` under `key`; let go of when nobody holds this any more."""

    def __init__(self, cluster: Cluster, key: str, samples: int) -> None:
        self.cluster, self.key, self.samples = cluster, key, samples
        weakref.finalize(self, cluster.let_go, key)


def partition(
    cluster: Cluster,
    data: Any,
    *,
    by: str = "contiguous",
    weights: Sequence[float] | None = None,
    labels: Any = None,
    seed: int | None = None,
    check: Callable[[Partition], None] | None = None,
) -> Partition:
    """See :meth:`dtkit.Cluster.partition`. `check` may refuse the partition before any of its rows travel."""
    cut: dict[str, Any] = {"by": by, "weights": weights, "seed": seed}
    ranks = cluster.world_size
    if _is_loader(data):
        key, samples = _load_by_function(cluster, data)
        part = Partition(samples, ranks, labels=labels, source=Placed(cluster, key, samples), **cut)
        if check is not None:
            check(part)
        cluster.ask("shard", key=key, indices=part.flat(), sizes=part.sizes)
        return part
    data, samples = _checked(data)
    if labels is None and isinstance(data, tuple) and len(data) > 1:
        labels = categorical(data[-1])
    part = Partition(samples, ranks, labels=labels, **cut)  # its complaints come before anything travels
    if check is not None:
        check(part)
    part.source = _send(cluster, data, part.flat(), part.sizes)
    return part


def place(cluster: Cluster, data: Any) -> Placed:
    """Data to evaluate on, in equal contiguous parts; there may be fewer samples than ranks."""
    ranks = cluster.world_size
    if isinstance(data, Partition):
        return source_of(cluster, data)
    if _is_loader(data):
        key, samples = _load_by_function(cluster, data)
        cluster.ask("shard", key=key, indices=np.arange(samples, dtype=np.int32), sizes=_even(samples, ranks))
        return Placed(cluster, key, samples)
    data, samples = _checked(data)
    return _send(cluster, data, np.arange(samples, dtype=np.int32), _even(samples, ranks))


def source_of(cluster: Cluster, part: Partition) -> Placed:
    """Where a partition's rows lie, which must be on this cluster."""
    placed = part.source
    if not isinstance(placed, Placed) or placed.cluster is not cluster:
        raise ValueError(
            f"{part!r} was not made by this cluster, so its rows are not on these engines. Make it with "
            "cluster.partition(data)"
        )
    return placed


def _even(samples: int, ranks: int) -> list[int]:
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


def _is_loader(data: Any) -> bool:
    """Whether this is a function to call on the engines: it is called, and holds no rows itself."""
    return callable(data) and not hasattr(data, "__getitem__")


def _load_by_function(cluster: Cluster, function: Any) -> tuple[str, int]:
    key = cluster.new_key("data")
    shipment = cluster.upload(cluster.pack(function, name="data"))
    with waiting("loading data on the engines"):
        try:
            lengths = cluster.ask("load", key=key, shipment=shipment, sizes=None)
        finally:
            cluster.discard(shipment)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the function loaded {lengths} rows on ranks 0 to {len(lengths) - 1}; it must load the same rows in the "
            "same order everywhere, since ranks pick theirs by row number. Seed what is random in it"
        )
    return key, int(lengths[0])


def _send(cluster: Cluster, data: Any, rows: np.ndarray, sizes: Sequence[int]) -> Placed:
    key = cluster.new_key("data")
    packed = cluster.pack((data, rows), name="data")
    with waiting(f"sending {units.size(packed.nbytes)} to {cluster.world_size} engines"):
        cluster.deliver("load", packed, key=key, sizes=tuple(sizes))
    return Placed(cluster, key, int(sum(sizes)))


def _checked(data: Any) -> tuple[Any, int]:
    """Arrays as a tuple, or a Dataset; with the number of rows."""
    if type(data).__name__ == "TensorDataset" and hasattr(data, "tensors"):
        data = tuple(data.tensors)
    if hasattr(data, "__array__"):
        data = (data,)
    if isinstance(data, (tuple, list)):
        return _checked_arrays(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (dict, str, bytes)):
        return data, len(data)
    raise TypeError(
        f"data is a {type(data).__name__}; it must be a tuple of arrays as in (X, y), a map-style Dataset (with "
        "__len__ and __getitem__), or a function that returns one of these on the engine"
    )


def _checked_arrays(data: Sequence[Any]) -> tuple[Any, int]:
    arrays = []
    for k, array in enumerate(data):
        if not hasattr(array, "__array__"):
            raise TypeError(
                f"data[{k}] is a {type(array).__name__}; each part must be a numpy array or a tensor. "
                "Convert it with numpy.asarray"
            )
        if type(array).__module__.partition(".")[0] != "torch":
            array = _numbers(np.asarray(array), k)  # noqa: PLW2901 - the same array in the one form that travels
        arrays.append(array)
    shapes = [tuple(a.shape) for a in arrays]
    if not shapes or any(not shape for shape in shapes):
        raise ValueError(
            f"data has arrays of shapes {shapes}; each must have rows. Give arrays of one dimension or more"
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"data has arrays of {', '.join(str(s[0]) for s in shapes)} rows (shapes {shapes}); all must have equally "
            "many, one per sample. Cut them to the same length"
        )
    return tuple(arrays), int(shapes[0][0])


def _numbers(array: np.ndarray, k: int) -> np.ndarray:
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"data[{k}] has dtype {array.dtype}; tensors hold numbers only. Encode it first, as in "
            "numpy.unique(labels, return_inverse=True)[1]"
        )
    return array

"""Data on its way to the engines: what a user may give, and where it then lies.

Arrays, tables and Datasets are taken apart once and put where every engine of this host maps the same bytes
(:mod:`dtkit.rpc.shared_memory`); on several hosts they go to rank 0 and from there by broadcast. The file has no name
any more once every engine has mapped it, so the system frees it with the last of them, in whatever way that ends.

What lies in files already stays there: of a memory-mapped array, of parquet and of a Dataset on disk only the place
travels, and each engine reads the rows that it needs. A function is called on each engine instead. It may give a stream
without length, which can be trained on but not cut into shards (:class:`Flow`).
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.progress import waiting
from dtkit.data import columns as frames
from dtkit.data.columns import Columns
from dtkit.data.partition import Partition, categorical
from dtkit.engine.data import iterable
from dtkit.engine.data import paths as files
from dtkit.engine.data.memmap import MappedFile, OnDisk
from dtkit.engine.data.parquet import ParquetFiles, ParquetSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster.cluster import Cluster

_MOST_LABELS = 2**24
"""Labels that are read for a picture's sake from a file or an arrow table."""


class Placed:
    """Data that lies on the engines of `cluster` under `key`; let go of when nobody holds this any more.

    `samples` is None where nobody knows it. `columns` says which of a table's were used, for data to evaluate on.
    """

    def __init__(self, cluster: Cluster, key: str, samples: int | None, columns: Columns | None = None) -> None:
        self.cluster, self.key, self.samples = cluster, key, samples
        self.columns = columns or Columns()
        weakref.finalize(self, cluster.let_go, key)


class Flow(Placed):
    """A stream of samples whose number nobody knows: each rank iterates over its own part."""

    def __init__(self, cluster: Cluster, key: str, columns: Columns) -> None:
        super().__init__(cluster, key, None, columns)


@dataclasses.dataclass(frozen=True)
class _Offer:
    """Rows by number, looked at in the notebook and ready to travel."""

    data: Any
    samples: int
    columns: Columns
    labels: Any = None
    note: str = ""
    in_blocks: bool = False
    """Whether rows are read in blocks, so that shards had better be contiguous."""


def partition(
    cluster: Cluster,
    data: Any,
    *,
    by: str = "contiguous",
    weights: Sequence[float] | None = None,
    labels: Any = None,
    seed: int | None = None,
    target: Any = None,
    columns: Any = None,
    check: Callable[[Partition], None] | None = None,
) -> Partition:
    """See :meth:`dtkit.Cluster.partition`. `check` may refuse the partition before any of its rows travel."""
    cut = _Cut(cluster, {"by": by, "weights": weights, "seed": seed}, labels, check)
    asked = Columns.asked(target, columns)
    if not _is_brought(data):
        return cut.offered(_offer(data, asked))
    _refuse_to_cut(data)
    found = _bring(cluster, data, asked)
    if isinstance(found, Flow):
        _refuse_to_cut(found)
    return cut.brought(found)


def for_training(
    cluster: Cluster,
    data: Any,
    *,
    seed: int,
    target: Any = None,
    check: Callable[[Partition], None],
    check_flow: Callable[[], None],
) -> Partition | Flow:
    """What ``train`` was given, unless it was a Partition: permuted by `seed` and cut, or a stream.

    Rows that are read in blocks are cut as they lie, so that each engine reads blocks of its own. `check_flow` may
    refuse a stream, before it is brought to the engines where it is plain that it is one.
    """
    asked = Columns.asked(target)
    if not _is_brought(data):
        offer = _offer(data, asked)
        kept = {"by": "contiguous", "weights": None, "seed": None if offer.in_blocks else seed}
        return _Cut(cluster, kept, None, check).offered(offer)
    if _is_plain_stream(data):
        check_flow()
    found = _bring(cluster, data, asked)
    if isinstance(found, Flow):
        check_flow()
        return found
    return _Cut(cluster, {"by": "contiguous", "weights": None, "seed": seed}, None, check).brought(found)


def place(cluster: Cluster, data: Any, *, target: Any = None, like: Placed | None = None) -> Placed:
    """Data to evaluate on, in equal contiguous parts; there may be fewer samples than ranks.

    A table's columns are those named, else those of the data trained on (`like`), in its order and with its classes.
    """
    ranks = cluster.world_size
    if isinstance(data, Partition):
        return source_of(cluster, data)
    asked = Columns.asked(target) if like is None or target is not None else like.columns
    if _is_brought(data):
        found = data if isinstance(data, Flow) or _is_plain_stream(data) else _bring(cluster, data, asked)
        if not isinstance(found, Placed) or found.samples is None:
            raise ValueError(
                "this data is a stream without length, so an evaluation would have no end. Give the samples to "
                "evaluate on as arrays or as a Dataset"
            )
        rows = np.arange(found.samples, dtype=np.int32)
        cluster.ask("shard", key=found.key, indices=rows, sizes=_even(found.samples, ranks))
        return found
    offer = _offer(data, asked, evaluating=True)
    if not offer.samples:
        raise ValueError(
            "the data to evaluate on has no samples, so its loss would be 0 / 0. Give some, or leave it out"
        )
    return _send(cluster, offer, np.arange(offer.samples, dtype=np.int32), _even(offer.samples, ranks))


def source_of(cluster: Cluster, part: Partition) -> Placed:
    """Where a partition's rows lie, which must be on this cluster."""
    placed = part.source
    if not isinstance(placed, Placed) or placed.cluster is not cluster:
        raise ValueError(
            f"{part!r} was not made by this cluster, so its rows are not on these engines. Make it with "
            "cluster.partition(data)"
        )
    return placed


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How rows are to be cut, and who may refuse the result."""

    cluster: Cluster
    how: dict[str, Any]
    labels: Any
    check: Callable[[Partition], None] | None

    def offered(self, offer: _Offer) -> Partition:
        """Cut rows that are here, and send them; all complaints come before anything travels."""
        labels = offer.labels if self.labels is None else self.labels
        part = Partition(offer.samples, self.cluster.world_size, labels=labels, **self.how)
        part.note = offer.note
        if self.check is not None:
            self.check(part)
        part.source = _send(self.cluster, offer, part.flat(), part.sizes)
        return part

    def brought(self, placed: Placed) -> Partition:
        """Cut rows that the engines have loaded already."""
        assert placed.samples is not None
        ranks = self.cluster.world_size
        part = Partition(placed.samples, ranks, labels=self.labels, source=placed, **self.how)
        if self.check is not None:
            self.check(part)
        self.cluster.ask("shard", key=placed.key, indices=part.flat(), sizes=part.sizes)
        return part


def _even(samples: int, ranks: int) -> list[int]:
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


def _send(cluster: Cluster, offer: _Offer, rows: np.ndarray, sizes: Sequence[int]) -> Placed:
    key = cluster.new_key("data")
    packed = cluster.pack((offer.data, rows), name="data")
    with waiting(f"sending {formatting.size(packed.nbytes)} to {cluster.world_size} engines"):
        cluster.deliver("load", packed, key=key, sizes=tuple(sizes))
    return Placed(cluster, key, offer.samples, offer.columns)


# --- functions and streams: brought by calling or iterating on the engine -----------------------------------------


def _is_brought(data: Any) -> bool:
    """Whether engines get at the data by a call or by iterating; rows by number are looked at here."""
    _refuse_started(data)
    return isinstance(data, Flow) or _is_function(data) or iterable.is_stream(data)


def _is_function(data: Any) -> bool:
    """Whether this is a function to call on the engines: it is called, and holds no rows itself."""
    return isinstance(data, type) or (
        callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")
    )


def _is_plain_stream(data: Any) -> bool:
    """Whether it can be told without a call that this is a stream."""
    return iterable.may_stream(data) if _is_function(data) else iterable.is_stream(data)


def _refuse_started(data: Any) -> None:
    """Refuse what iterates here and now, and can't be sent."""
    if hasattr(data, "__next__") and not isinstance(data, type):
        raise TypeError(
            f"data is a {type(data).__name__} that iterates in this process; it can't be sent. Give the function that "
            "makes it, without calling it: every engine calls it for itself"
        )
    if any(kind.__name__ == "DataLoader" for kind in type(data).__mro__):
        raise TypeError(
            "data is a DataLoader, which batches in this process; engines make their own batches. Give its dataset "
            "(loader.dataset), with batch_size= and workers= beside it"
        )


def _refuse_to_cut(data: Any) -> None:
    if isinstance(data, Flow) or _is_plain_stream(data):
        raise ValueError(
            "this data is a stream without length, so there are no rows to cut into shards. Give it to "
            "cluster.train(model, data, steps=...) as it is: each rank takes its part as it comes"
        )


def _bring(cluster: Cluster, data: Any, columns: Columns) -> Placed:
    """Have every engine call the function, or keep the iterable; the rows must be the same everywhere."""
    if isinstance(data, Flow):
        return data
    from dtkit.engine.data import sources

    bring = sources.load if _is_function(data) else sources.as_source
    if _is_function(data):
        iterable.takes_rank(data)  # refuses one that can't be called
    key = cluster.new_key("data")
    shipment = cluster.upload(cluster.pack(functools.partial(bring, data, columns), name="data"))
    with waiting("loading data on the engines"):
        try:
            lengths = cluster.ask("load", key=key, shipment=shipment, sizes=None)
        finally:
            cluster.discard(shipment)
    if set(lengths) == {None}:
        return Flow(cluster, key, columns)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the function loaded {lengths} rows on ranks 0 to {len(lengths) - 1}; it must load the same rows in the "
            "same order everywhere, since ranks pick theirs by row number. Seed what is random in it"
        )
    return Placed(cluster, key, int(lengths[0]), columns)


# --- rows by number: looked at here ---------------------------------------------------------------------------


def _offer(data: Any, asked: Columns, *, evaluating: bool = False) -> _Offer:
    """What travels for `data`, and what is to be known of it. Raises ValueError or TypeError for what can't work."""
    data = files.found_in(data, asked)
    if isinstance(data, ParquetFiles):
        return _offer_parquet(data, want_labels=not evaluating)
    if _is_hub(data):
        return _offer_hub(data, asked)
    if frames.is_pandas(data):
        arrays, columns = frames.from_frame(data, asked)
        return _offer_arrays(arrays, columns, frames.described(arrays, columns))
    if type(data).__name__ == "TensorDataset" and hasattr(data, "tensors"):
        data = tuple(data.tensors)
    if hasattr(data, "to_pandas"):
        raise TypeError(f"data is a {type(data).__module__}.{type(data).__name__}; give data.to_pandas()")
    if hasattr(data, "__array__") or isinstance(data, MappedFile):
        data = (data,)
    if isinstance(data, (tuple, list)):
        if asked.given and not evaluating:
            raise ValueError(
                f"target={asked.target!r}, columns={asked.features!r} name columns of a table, and this data is "
                "arrays, of which the last is the target. Leave them out"
            )
        return _offer_arrays(frames.without_pandas(data, asked.floating), Columns())
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (dict, str, bytes)):
        return _Offer(_WithColumns(data, asked) if asked.given else data, len(data), asked)
    raise TypeError(
        f"data is a {type(data).__name__}; it must be a tuple of arrays as in (X, y), a map-style Dataset (with "
        "__len__ and __getitem__), a DataFrame, a path of .npy or .parquet files, an iterable of samples, or a "
        "function that returns one of these on the engine"
    )


def _offer_arrays(data: Sequence[Any], columns: Columns, note: str = "") -> _Offer:
    arrays, samples = _checked_arrays(data)
    labels = None
    if len(arrays) > 1:
        last = arrays[-1]
        labels = categorical(last.open() if isinstance(last, MappedFile) else last)
    return _Offer(arrays, samples, columns, labels, note)


def _offer_parquet(data: ParquetFiles, *, want_labels: bool) -> _Offer:
    labels = None
    if want_labels and len(data.columns.targets) == 1 and data.rows <= _MOST_LABELS:
        labels = categorical(ParquetSource(data).target())
    return _Offer(data, data.rows, data.columns, labels, f"read by row group from {data.name}", in_blocks=True)


def _is_hub(data: Any) -> bool:
    return any(k.__module__ == "datasets.arrow_dataset" and k.__name__ == "Dataset" for k in type(data).__mro__)


def _offer_hub(data: Any, asked: Columns) -> _Offer:
    """A Dataset of ``datasets``: what is on disk is mapped there by every engine, the rest travels in shared memory."""
    from dtkit.engine.data.sources import check_hub

    columns = check_hub(data, asked)
    labels = None
    if len(columns.targets) == 1 and len(data) <= _MOST_LABELS:
        name = columns.targets[0]
        found = np.asarray(data.select_columns([name]).with_format("numpy")[:][name])
        labels = categorical(found) if found.dtype.kind in "biuf" else None
    paths = [file["filename"] for file in data.cache_files]
    sent = _WithColumns(data, columns) if columns.given else data
    note = f"mapped by every engine from {formatting.plural(len(paths), 'arrow file')}" if paths else ""
    return _Offer(OnDisk(paths, sent) if paths else sent, len(data), columns, labels, note)


class _WithColumns:
    """A Dataset and the columns of its samples that were named; unpickles to the Source that both make."""

    def __init__(self, data: Any, columns: Columns) -> None:
        self._data, self._columns = data, columns

    def __reduce__(self) -> tuple[Any, ...]:
        from dtkit.engine.data.sources import as_source

        return as_source, (self._data, self._columns)


def _checked_arrays(data: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
    arrays = []
    for k, array in enumerate(data):
        if not (hasattr(array, "__array__") or isinstance(array, MappedFile)):
            raise TypeError(
                f"data[{k}] is a {type(array).__name__}; each part must be a numpy array or a tensor. "
                "Convert it with numpy.asarray"
            )
        if type(array).__module__.partition(".")[0] != "torch":
            array = _numbers(array if isinstance(array, MappedFile) else np.asarray(array), k)  # noqa: PLW2901 - the same array in the one form that travels
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


def _numbers(array: Any, k: int) -> Any:
    if np.dtype(array.dtype).kind not in "biufc":
        raise TypeError(
            f"data[{k}] has dtype {array.dtype}; tensors hold numbers only. Encode it first, as in "
            "numpy.unique(labels, return_inverse=True)[1]"
        )
    return array

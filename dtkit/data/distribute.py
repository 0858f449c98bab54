"""Data on its way to the engines: what a user may give, and where it then lies.

Arrays, tables and Datasets are taken apart once and put where every engine of this host maps the same bytes
(:mod:`dtkit.rpc.shared_memory`); on several hosts they go to rank 0 and from there by broadcast. The file has no name
any more once every engine has mapped it, so the system frees it with the last of them, in whatever way that ends.

What lies in files already stays there: of a memory-mapped array, of parquet and of a Dataset on disk only the place
travels, and each engine reads the rows that it needs. A function is called on each engine instead. It may give a stream
without length, which can be trained on but not cut into shards (:class:`StreamHandle`).
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.text.progress import show_progress
from dtkit.data import columns as frames
from dtkit.data.columns import ColumnSelection
from dtkit.data.partition import Partition, as_labels
from dtkit.engine.data import iterable
from dtkit.engine.data import paths as files
from dtkit.engine.data.memmap import FileBackedData, MappedFile
from dtkit.engine.data.parquet import ParquetFiles, ParquetSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster.cluster import Cluster

_MAX_LABELS = 2**24
"""Labels that are read for a picture's sake from a file or an arrow table."""


class DataHandle:
    """Data that lies on the engines of `cluster` under `key`; let go of when nobody holds this any more.

    `samples` is None where nobody knows it. `columns` says which of a table's were used, for data to evaluate on.
    """

    def __init__(
        self, cluster: Cluster, key: str, num_samples: int | None, columns: ColumnSelection | None = None
    ) -> None:
        self.cluster, self.key, self.num_samples = cluster, key, num_samples
        self.columns = columns or ColumnSelection()
        weakref.finalize(self, cluster.free_later, key)


class StreamHandle(DataHandle):
    """A stream of samples whose number nobody knows: each rank iterates over its own part."""

    def __init__(self, cluster: Cluster, key: str, columns: ColumnSelection) -> None:
        super().__init__(cluster, key, None, columns)


@dataclasses.dataclass(frozen=True)
class _NotebookData:
    """Rows by number, looked at in the notebook and ready to travel."""

    data: Any
    num_samples: int
    columns: ColumnSelection
    labels: Any = None
    note: str = ""
    reads_in_blocks: bool = False
    """Whether rows are read in blocks, so that shards had better be contiguous."""


def partition_data(
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
    cut = _PartitionRequest(cluster, {"by": by, "weights": weights, "seed": seed}, labels, check)
    asked = ColumnSelection.from_arguments(target, columns)
    if not _is_loaded_by_engines(data):
        return cut.partition_notebook_data(_inspect_data(data, asked))
    _refuse_to_partition(data)
    found = _load_on_engines(cluster, data, asked)
    if isinstance(found, StreamHandle):
        _refuse_to_partition(found)
    return cut.partition_engine_data(found)


def distribute_training_data(
    cluster: Cluster,
    data: Any,
    *,
    seed: int,
    target: Any = None,
    check: Callable[[Partition], None],
    check_stream: Callable[[], None],
) -> Partition | StreamHandle:
    """What ``train`` was given, unless it was a Partition: permuted by `seed` and cut, or a stream.

    Rows that are read in blocks are cut as they lie, so that each engine reads blocks of its own. `check_flow` may
    refuse a stream, before it is brought to the engines where it is plain that it is one.
    """
    asked = ColumnSelection.from_arguments(target)
    if not _is_loaded_by_engines(data):
        offer = _inspect_data(data, asked)
        kept = {"by": "contiguous", "weights": None, "seed": None if offer.reads_in_blocks else seed}
        return _PartitionRequest(cluster, kept, None, check).partition_notebook_data(offer)
    if _is_plain_stream(data):
        check_stream()
    found = _load_on_engines(cluster, data, asked)
    if isinstance(found, StreamHandle):
        check_stream()
        return found
    return _PartitionRequest(
        cluster, {"by": "contiguous", "weights": None, "seed": seed}, None, check
    ).partition_engine_data(found)


def distribute_validation_data(
    cluster: Cluster, data: Any, *, target: Any = None, training_data: DataHandle | None = None
) -> DataHandle:
    """Data to evaluate on, in equal contiguous parts; there may be fewer samples than ranks.

    A table's columns are those named, else those of the data trained on (`like`), in its order and with its classes.
    """
    ranks = cluster.world_size
    if isinstance(data, Partition):
        return get_data_handle(cluster, data)
    asked = (
        ColumnSelection.from_arguments(target) if training_data is None or target is not None else training_data.columns
    )
    if _is_loaded_by_engines(data):
        found = (
            data if isinstance(data, StreamHandle) or _is_plain_stream(data) else _load_on_engines(cluster, data, asked)
        )
        if not isinstance(found, DataHandle) or found.num_samples is None:
            raise ValueError(
                "this data is a stream without length, so an evaluation would have no end. Give the samples to "
                "evaluate on as arrays or as a Dataset"
            )
        rows = np.arange(found.num_samples, dtype=np.int32)
        cluster.call_all("set_shards", key=found.key, indices=rows, sizes=_compute_even_sizes(found.num_samples, ranks))
        return found
    offer = _inspect_data(data, asked, for_evaluation=True)
    if not offer.num_samples:
        raise ValueError(
            "the data to evaluate on has no samples, so its loss would be 0 / 0. Give some, or leave it out"
        )
    return _send_data(
        cluster, offer, np.arange(offer.num_samples, dtype=np.int32), _compute_even_sizes(offer.num_samples, ranks)
    )


def get_data_handle(cluster: Cluster, partition: Partition) -> DataHandle:
    """Where a partition's rows lie, which must be on this cluster."""
    placed = partition.source
    if not isinstance(placed, DataHandle) or placed.cluster is not cluster:
        raise ValueError(
            f"{partition!r} was not made by this cluster, so its rows are not on these engines. Make it with "
            "cluster.partition(data)"
        )
    return placed


@dataclasses.dataclass(frozen=True)
class _PartitionRequest:
    """How rows are to be cut, and who may refuse the result."""

    cluster: Cluster
    options: dict[str, Any]
    labels: Any
    check: Callable[[Partition], None] | None

    def partition_notebook_data(self, notebook_data: _NotebookData) -> Partition:
        """Cut rows that are here, and send them; all complaints come before anything travels."""
        labels = notebook_data.labels if self.labels is None else self.labels
        part = Partition(notebook_data.num_samples, self.cluster.world_size, labels=labels, **self.options)
        part.note = notebook_data.note
        if self.check is not None:
            self.check(part)
        part.source = _send_data(self.cluster, notebook_data, part.flatten_indices(), part.sizes)
        return part

    def partition_engine_data(self, data_handle: DataHandle) -> Partition:
        """Cut rows that the engines have loaded already."""
        assert data_handle.num_samples is not None
        ranks = self.cluster.world_size
        part = Partition(data_handle.num_samples, ranks, labels=self.labels, source=data_handle, **self.options)
        if self.check is not None:
            self.check(part)
        self.cluster.call_all("set_shards", key=data_handle.key, indices=part.flatten_indices(), sizes=part.sizes)
        return part


def _compute_even_sizes(num_samples: int, ranks: int) -> list[int]:
    return [num_samples // ranks + (rank < num_samples % ranks) for rank in range(ranks)]


def _send_data(cluster: Cluster, notebook_data: _NotebookData, rows: np.ndarray, sizes: Sequence[int]) -> DataHandle:
    key = cluster.make_key("data")
    packed = cluster.pack((notebook_data.data, rows), name="data")
    with show_progress(f"sending {formatting.format_bytes(packed.nbytes)} to {cluster.world_size} engines"):
        cluster.call_all_with_payload("load_data", packed, key=key, sizes=tuple(sizes))
    return DataHandle(cluster, key, notebook_data.num_samples, notebook_data.columns)


# --- functions and streams: brought by calling or iterating on the engine -----------------------------------------


def _is_loaded_by_engines(data: Any) -> bool:
    """Whether engines get at the data by a call or by iterating; rows by number are looked at here."""
    _refuse_iterator(data)
    return isinstance(data, StreamHandle) or _is_function(data) or iterable.is_iterable_only(data)


def _is_function(data: Any) -> bool:
    """Whether this is a function to call on the engines: it is called, and holds no rows itself."""
    return isinstance(data, type) or (
        callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")
    )


def _is_plain_stream(data: Any) -> bool:
    """Whether it can be told without a call that this is a stream."""
    return iterable.is_stream_factory(data) if _is_function(data) else iterable.is_iterable_only(data)


def _refuse_iterator(data: Any) -> None:
    """Refuse what iterates here and now, and can't be sent."""
    if hasattr(data, "__next__") and not isinstance(data, type):
        raise TypeError(
            f"data is a {type(data).__name__} that iterates in this process; it can't be sent. Give the function that "
            "makes it, without calling it: every engine calls it for itself"
        )
    if any(kind.__name__ == "DataLoader" for kind in type(data).__mro__):
        raise TypeError(
            "data is a DataLoader, which batches in this process; engines make their own batches. Give its dataset "
            "(loader.dataset), with batch_size= and num_workers= beside it"
        )


def _refuse_to_partition(data: Any) -> None:
    if isinstance(data, StreamHandle) or _is_plain_stream(data):
        raise ValueError(
            "this data is a stream without length, so there are no rows to cut into shards. Give it to "
            "cluster.train(model, data, steps=...) as it is: each rank takes its part as it comes"
        )


def _load_on_engines(cluster: Cluster, data: Any, columns: ColumnSelection) -> DataHandle:
    """Have every engine call the function, or keep the iterable; the rows must be the same everywhere."""
    if isinstance(data, StreamHandle):
        return data
    from dtkit.engine.data import sources

    bring = sources.load_source if _is_function(data) else sources.as_source
    if _is_function(data):
        iterable.accepts_rank(data)  # refuses one that can't be called
    key = cluster.make_key("data")
    shipment = cluster.upload(cluster.pack(functools.partial(bring, data, columns), name="data"))
    with show_progress("loading data on the engines"):
        try:
            lengths = cluster.call_all("load_data", key=key, shipment=shipment, sizes=None)
        finally:
            cluster.discard_payload(shipment)
    if set(lengths) == {None}:
        return StreamHandle(cluster, key, columns)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the function loaded {lengths} rows on ranks 0 to {len(lengths) - 1}; it must load the same rows in the "
            "same order everywhere, since ranks pick theirs by row number. Seed what is random in it"
        )
    return DataHandle(cluster, key, int(lengths[0]), columns)


# --- rows by number: looked at here ---------------------------------------------------------------------------


def _inspect_data(data: Any, column_selection: ColumnSelection, *, for_evaluation: bool = False) -> _NotebookData:
    """What travels for `data`, and what is to be known of it. Raises ValueError or TypeError for what can't work."""
    data = files.describe_files(data, column_selection)
    if isinstance(data, ParquetFiles):
        return _inspect_parquet(data, want_labels=not for_evaluation)
    if _is_hugging_face_dataset(data):
        return _inspect_hugging_face_dataset(data, column_selection)
    if frames.is_pandas(data):
        arrays, columns = frames.convert_frame(data, column_selection)
        return _inspect_arrays(arrays, columns, frames.describe_arrays(arrays, columns))
    if type(data).__name__ == "TensorDataset" and hasattr(data, "tensors"):
        data = tuple(data.tensors)
    if hasattr(data, "to_pandas"):
        raise TypeError(f"data is a {type(data).__module__}.{type(data).__name__}; give data.to_pandas()")
    if hasattr(data, "__array__") or isinstance(data, MappedFile):
        data = (data,)
    if isinstance(data, (tuple, list)):
        if column_selection.is_given and not for_evaluation:
            raise ValueError(
                f"target={column_selection.target!r}, columns={column_selection.features!r} name columns of a table, and this data is "
                "arrays, of which the last is the target. Leave them out"
            )
        return _inspect_arrays(frames.convert_pandas_parts(data, column_selection.float_dtype), ColumnSelection())
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (dict, str, bytes)):
        return _NotebookData(
            _WithColumns(data, column_selection) if column_selection.is_given else data, len(data), column_selection
        )
    raise TypeError(
        f"data is a {type(data).__name__}; it must be a tuple of arrays as in (X, y), a map-style Dataset (with "
        "__len__ and __getitem__), a DataFrame, a path of .npy or .parquet files, an iterable of samples, or a "
        "function that returns one of these on the engine"
    )


def _inspect_arrays(data: Sequence[Any], columns: ColumnSelection, note: str = "") -> _NotebookData:
    arrays, samples = _check_arrays(data)
    labels = None
    if len(arrays) > 1:
        last = arrays[-1]
        labels = as_labels(last.open() if isinstance(last, MappedFile) else last)
    return _NotebookData(arrays, samples, columns, labels, note)


def _inspect_parquet(data: ParquetFiles, *, want_labels: bool) -> _NotebookData:
    labels = None
    if want_labels and len(data.columns.target_names) == 1 and data.num_rows <= _MAX_LABELS:
        labels = as_labels(ParquetSource(data).read_target())
    return _NotebookData(
        data, data.num_rows, data.columns, labels, f"read by row group from {data.display_name}", reads_in_blocks=True
    )


def _is_hugging_face_dataset(data: Any) -> bool:
    return any(k.__module__ == "datasets.arrow_dataset" and k.__name__ == "Dataset" for k in type(data).__mro__)


def _inspect_hugging_face_dataset(data: Any, column_selection: ColumnSelection) -> _NotebookData:
    """A Dataset of ``datasets``: what is on disk is mapped there by every engine, the rest travels in shared memory."""
    from dtkit.engine.data.sources import check_hub_columns

    columns = check_hub_columns(data, column_selection)
    labels = None
    if len(columns.target_names) == 1 and len(data) <= _MAX_LABELS:
        name = columns.target_names[0]
        found = np.asarray(data.select_columns([name]).with_format("numpy")[:][name])
        labels = as_labels(found) if found.dtype.kind in "biuf" else None
    paths = [file["filename"] for file in data.cache_files]
    sent = _WithColumns(data, columns) if columns.is_given else data
    note = f"mapped by every engine from {formatting.format_count(len(paths), 'arrow file')}" if paths else ""
    return _NotebookData(FileBackedData(paths, sent) if paths else sent, len(data), columns, labels, note)


class _WithColumns:
    """A Dataset and the columns of its samples that were named; unpickles to the Source that both make."""

    def __init__(self, data: Any, columns: ColumnSelection) -> None:
        self._data, self._columns = data, columns

    def __reduce__(self) -> tuple[Any, ...]:
        from dtkit.engine.data.sources import as_source

        return as_source, (self._data, self._columns)


def _check_arrays(data: Sequence[Any]) -> tuple[tuple[Any, ...], int]:
    arrays = []
    for k, array in enumerate(data):
        if not (hasattr(array, "__array__") or isinstance(array, MappedFile)):
            raise TypeError(
                f"data[{k}] is a {type(array).__name__}; each part must be a numpy array or a tensor. "
                "Convert it with numpy.asarray"
            )
        if type(array).__module__.partition(".")[0] != "torch":
            array = _to_numeric_array(array if isinstance(array, MappedFile) else np.asarray(array), k)  # noqa: PLW2901 - the same array in the one form that travels
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


def _to_numeric_array(array: Any, k: int) -> Any:
    if np.dtype(array.dtype).kind not in "biufc":
        raise TypeError(
            f"data[{k}] has dtype {array.dtype}; tensors hold numbers only. Encode it first, as in "
            "numpy.unique(labels, return_inverse=True)[1]"
        )
    return array

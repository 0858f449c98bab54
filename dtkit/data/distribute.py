"""Distribution of data to the engines.

Arrays, tables and Datasets are copied once into shared memory, which every engine of this host maps
(:mod:`dtkit.rpc.shared_memory`). On several hosts they are sent to rank 0 and broadcast from there. The shared file is
unlinked once every engine has mapped it, so the system frees it with the last engine.

Data in files stays there. For memory-mapped arrays, parquet files and Datasets on disk, the notebook sends only paths.
Each engine reads the rows that it needs. A function is called on each engine instead. It may return a stream without
length, which can be trained on but not divided into shards (:class:`StreamHandle`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting
from dtkit._util.formatting import name_type
from dtkit.dashboard.text.progress import show_progress
from dtkit.data.columns import ColumnSelection
from dtkit.data.notebook_data import NotebookData, copy_first_rows, describe_shapes, inspect_data
from dtkit.data.partition import Partition
from dtkit.data.sharding import divide_evenly
from dtkit.data.torch_loader import is_data_loader, read_data_loader
from dtkit.engine.data import iterable
from dtkit.rpc.protocol import DataOperations, make_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.rpc.engine_group import EngineGroup


class DataHandle:
    """Data on the engines, stored under `key`. They free it after this handle is garbage-collected.

    `num_samples` is None and `nbytes` infinite if unknown. `columns` has the used columns of a table, which validation
    data needs too. `first_rows` are a few rows of arrays that the notebook had, and None for other data. `shapes` has
    the shapes and dtypes of arrays that the notebook had, as text. An
    evaluation takes `batch_size` rows at a time over all ranks; None stands for the training's number.
    """

    def __init__(
        self,
        engine_group: EngineGroup,
        key: str,
        num_samples: int | None,
        columns: ColumnSelection | None = None,
        nbytes: float = math.inf,
    ) -> None:
        self.engine_group, self.key, self.num_samples, self.nbytes = engine_group, key, num_samples, nbytes
        self.columns = columns or ColumnSelection()
        self.first_rows: Any = None
        self.shapes = ""
        self.batch_size: int | None = None
        weakref.finalize(self, engine_group.free_later, key)


class StreamHandle(DataHandle):
    """Stream with an unknown number of samples. Each rank iterates over its own part."""

    def __init__(self, engine_group: EngineGroup, key: str, columns: ColumnSelection) -> None:
        super().__init__(engine_group, key, None, columns)


def partition_data(
    engine_group: EngineGroup,
    data: Any,
    *,
    by: str = "contiguous",
    weights: Sequence[float] | None = None,
    labels: Any = None,
    seed: int | None = None,
    target: Any = None,
    columns: Any = None,
    check: Callable[[Partition, ColumnSelection], None] | None = None,
) -> Partition:
    """Partition data: see :meth:`dtkit.Cluster.partition`. `check` may refuse the partition before rows are sent."""
    request = _PartitionRequest(engine_group, {"by": by, "weights": weights, "seed": seed}, labels, check)
    data, selection = unwrap_data_loader(data, ColumnSelection.from_arguments(target, columns))
    if not _is_loaded_by_engines(data):
        return request.partition_notebook_data(inspect_data(data, selection))
    _refuse_to_partition(data)
    handle = _load_on_engines(engine_group, data, selection)
    if isinstance(handle, StreamHandle):
        _refuse_to_partition(handle)
    return request.partition_engine_data(handle)


def distribute_training_data(
    engine_group: EngineGroup,
    data: Any,
    *,
    seed: int,
    columns: ColumnSelection,
    check: Callable[[Partition, ColumnSelection], None],
    check_stream: Callable[[], None],
) -> Partition | StreamHandle:
    """Distribute the `data` of ``train``: partition its rows, permuted by `seed`, or set up a stream.

    Rows that are read in blocks are not permuted, so that each engine reads blocks of its own. `check` gets the
    partition, and the columns of a table. `check_stream` may refuse a stream.
    """
    options = {"by": "contiguous", "weights": None, "seed": seed}
    if not _is_loaded_by_engines(data):
        inspected = inspect_data(data, columns)
        if inspected.reads_in_blocks:
            options["seed"] = None
        return _PartitionRequest(engine_group, options, None, check).partition_notebook_data(inspected)
    if _is_plain_stream(data):
        check_stream()
    handle = _load_on_engines(engine_group, data, columns)
    if isinstance(handle, StreamHandle):
        check_stream()
        return handle
    return _PartitionRequest(engine_group, options, None, check).partition_engine_data(handle)


def distribute_validation_data(
    engine_group: EngineGroup, data: Any, *, training_data: DataHandle | None = None, name: str = "data"
) -> DataHandle:
    """Send validation data, in equal contiguous parts; there may be fewer samples than ranks.

    The columns of a table are those of `training_data`, with its order and its classes. A DataLoader's
    batch size is kept. Errors for unusable data call them by `name`, the user's argument.
    """
    if isinstance(data, Partition):
        return get_data_handle(engine_group, data)
    selection = ColumnSelection.from_arguments(None) if training_data is None else training_data.columns
    batch_size = read_data_loader(data).batch_size if is_data_loader(data) else None
    data, selection = unwrap_data_loader(data, selection)
    if _is_loaded_by_engines(data, name):
        handle = _shard_engine_data(engine_group, data, selection, name)
    else:
        handle = _send_validation_rows(engine_group, inspect_data(data, selection, for_evaluation=True, name=name))
    handle.batch_size = batch_size
    return handle


def unwrap_data_loader(data: Any, columns: ColumnSelection) -> tuple[Any, ColumnSelection]:
    """Return a DataLoader's Dataset and the selection with its collate_fn; other data as they are."""
    if not is_data_loader(data):
        return data, columns
    settings = read_data_loader(data)
    collate_fn = columns.collate_fn if settings.collate_fn is None else settings.collate_fn
    return settings.dataset, dataclasses.replace(columns, collate_fn=collate_fn)


def _shard_engine_data(engine_group: EngineGroup, data: Any, columns: ColumnSelection, name: str) -> DataHandle:
    """Divide data that the engines load into equal contiguous shards. Raises ValueError for a stream."""
    handle = None if _is_plain_stream(data, name) else _load_on_engines(engine_group, data, columns, name)
    if handle is None or handle.num_samples is None:
        raise ValueError(
            f"{name} is a stream without length, so an evaluation would have no end. Give the samples to "
            "evaluate on as arrays or as a Dataset"
        )
    rows, sizes = _make_even_shards(handle.num_samples, engine_group.world_size)
    engine_group.call_all(make_call(DataOperations.set_shards, key=handle.key, indices=rows, sizes=sizes))
    return handle


def _send_validation_rows(engine_group: EngineGroup, notebook_data: NotebookData) -> DataHandle:
    if not notebook_data.num_samples:
        raise ValueError(
            "the data to evaluate on has no samples, so there is no loss to compute. Give some, or leave it out"
        )
    return _send_data(
        engine_group, notebook_data, *_make_even_shards(notebook_data.num_samples, engine_group.world_size)
    )


def get_data_handle(engine_group: EngineGroup, partition: Partition) -> DataHandle:
    """Return the handle of a partition's rows. Raises ValueError unless they are on this cluster."""
    handle = partition.source
    if not isinstance(handle, DataHandle) or handle.engine_group is not engine_group:
        raise ValueError(
            f"{partition!r} was not made by this cluster, so its rows are not on these engines. Make it with "
            "cluster.partition(data)"
        )
    return handle


@dataclasses.dataclass(frozen=True)
class _PartitionRequest:
    """Options of a partition, and the function that may refuse it."""

    engine_group: EngineGroup
    options: dict[str, Any]
    labels: Any
    check: Callable[[Partition, ColumnSelection], None] | None

    def partition_notebook_data(self, notebook_data: NotebookData) -> Partition:
        """Partition rows of the notebook, and send them after all checks."""
        labels = notebook_data.labels if self.labels is None else self.labels
        partition = Partition(notebook_data.num_samples, self.engine_group.world_size, labels=labels, **self.options)
        partition.note = notebook_data.note
        if self.check is not None:
            self.check(partition, notebook_data.columns)
        handle = _send_data(self.engine_group, notebook_data, partition.flatten_indices(), partition.sizes)
        handle.first_rows, handle.shapes = copy_first_rows(notebook_data.data), describe_shapes(notebook_data.data)
        partition.source = handle
        return partition

    def partition_engine_data(self, data_handle: DataHandle) -> Partition:
        """Partition rows that the engines have loaded."""
        assert data_handle.num_samples is not None
        ranks = self.engine_group.world_size
        partition = Partition(data_handle.num_samples, ranks, labels=self.labels, source=data_handle, **self.options)
        if self.check is not None:
            self.check(partition, data_handle.columns)
        indices = partition.flatten_indices()
        self.engine_group.call_all(
            make_call(DataOperations.set_shards, key=data_handle.key, indices=indices, sizes=partition.sizes)
        )
        return partition


def _make_even_shards(num_samples: int, ranks: int) -> tuple[np.ndarray, list[int]]:
    """Return (all row numbers, rows of each rank), in order."""
    return np.arange(num_samples, dtype=np.int32), divide_evenly(num_samples, ranks)


def _send_data(
    engine_group: EngineGroup, notebook_data: NotebookData, rows: np.ndarray, sizes: Sequence[int]
) -> DataHandle:
    packed = engine_group.uploads.pack((notebook_data.data, rows), name="data")
    title = f"sending {formatting.format_bytes(packed.nbytes)} to {engine_group.world_size} engines"
    with show_progress(title), _make_data_key(engine_group) as key:
        engine_group.call_all_with_payload(
            lambda payload: make_call(DataOperations.load_data, key=key, payload=payload, sizes=tuple(sizes)), packed
        )
    return DataHandle(engine_group, key, notebook_data.num_samples, notebook_data.columns, packed.nbytes)


@contextlib.contextmanager
def _make_data_key(engine_group: EngineGroup) -> Iterator[str]:
    """Yield a new key. If the data do not reach all engines, free what the others have stored under it."""
    key = engine_group.make_key("data")
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(engine_group.free_later, key)
        yield key
        on_failure.pop_all()


# --- functions and streams, which engines call or iterate over --------------------------------------------------


def _is_loaded_by_engines(data: Any, name: str = "data") -> bool:
    """Return whether engines load the data. The notebook inspects data with rows that can be indexed."""
    _refuse_iterator(data, name)
    return isinstance(data, StreamHandle) or _is_function(data) or iterable.is_iterable_only(data)


def _is_function(data: Any) -> bool:
    """Return whether this is a function for engines to call, which has no rows itself."""
    return isinstance(data, type) or (
        callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__")
    )


def _is_plain_stream(data: Any, name: str = "data") -> bool:
    """Return whether data is a stream, as far as can be seen without calling it."""
    return iterable.is_stream_factory(data, name) if _is_function(data) else iterable.is_iterable_only(data)


def _refuse_iterator(data: Any, name: str) -> None:
    """Refuse iterators of this process, which can't be sent."""
    if hasattr(data, "__next__") and not isinstance(data, type):
        raise TypeError(
            f"{name} is {name_type(data)} that iterates in this process; it can't be sent. Give the function that "
            "creates it, not its result; each engine calls it"
        )


def _refuse_to_partition(data: Any) -> None:
    if isinstance(data, StreamHandle) or _is_plain_stream(data):
        raise ValueError(
            "this data is a stream without length, so there are no rows to divide into shards. Give it to "
            "cluster.train(model, data, steps=...): each rank takes its part during the run"
        )


def _load_on_engines(engine_group: EngineGroup, data: Any, columns: ColumnSelection, name: str = "data") -> DataHandle:
    """Have every engine call the function or store the iterable. All must get the same rows."""
    if isinstance(data, StreamHandle):
        return data
    from dtkit.engine.data import sources

    load = sources.load_source if _is_function(data) else sources.as_source
    if _is_function(data):
        iterable.accepts_rank(data, name)  # refuses one that can't be called
    payload = engine_group.uploads.upload(
        engine_group.uploads.pack(functools.partial(load, data, columns, name), name=name)
    )
    with show_progress("loading data on the engines"), _make_data_key(engine_group) as key:
        try:
            lengths = engine_group.call_all(make_call(DataOperations.load_data, key=key, payload=payload, sizes=None))
        finally:
            engine_group.uploads.discard(payload)
    if set(lengths) == {None}:
        return StreamHandle(engine_group, key, columns)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the function {name} loaded {lengths} rows on ranks 0 to {len(lengths) - 1}; it must load the same rows "
            "in the same order on all of them. Ranks select rows by number. Seed its random choices"
        )
    return DataHandle(engine_group, key, lengths[0], columns)

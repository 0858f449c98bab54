"""Sources of rows: one protocol for everything whose rows can be taken by index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch

from dtkit._util.formatting import name_type
from dtkit.data import columns as frames
from dtkit.data.columns import ColumnSelection, is_sample_list
from dtkit.engine.data import paths
from dtkit.engine.data.collation import collate_samples
from dtkit.engine.data.iterable import StreamSource, is_iterable_only, is_stream_factory
from dtkit.engine.data.memmap import MappedFile
from dtkit.engine.data.parquet import ParquetFiles, ParquetSource
from dtkit.engine.data.random_state import preserve_generators, seed_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RowSource(Protocol):
    """Rows that can be taken by index."""

    is_thread_safe: bool
    """Whether `take` runs no user code, so that it may run in a thread during a step."""
    reads_disk: bool
    """Whether it reads from a disk, so that a thread saves time."""
    is_same_on_all_ranks: bool
    """Whether a row is the same on every rank: the notebook sent it, or it is in a file. User code may differ."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Any:
        """Return a batch of these rows, on the CPU."""


class ArraySource:
    """Tensors of equal length; a batch is the tuple of their rows, or a dict of them by name."""

    is_thread_safe, reads_disk, is_same_on_all_ranks = True, False, True

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> None:
        self._tensors, self._names = tuple(tensors), tuple(names)

    def __len__(self) -> int:
        return len(self._tensors[0])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All rows, in the order of the data's arrays."""
        return self._tensors

    @property
    def labels(self) -> torch.Tensor | None:
        """Return the last tensor, or that of the name "labels"; None without that name."""
        if not self._names:
            return self._tensors[-1]
        return self._tensors[self._names.index("labels")] if "labels" in self._names else None

    def take(self, rows: np.ndarray) -> Any:
        """Return a batch by one `index_select` for each tensor."""
        return self._make_batch(self._select_rows(rows))

    def take_micro_batches(self, micro_batch_rows: Sequence[np.ndarray]) -> list[Any]:
        """Return the batches of several micro-batches, still by one `index_select` for each tensor."""
        sizes = [len(rows) for rows in micro_batch_rows]
        parts = [torch.split(t, sizes) for t in self._select_rows(np.concatenate(micro_batch_rows))]
        return [self._make_batch(tensors) for tensors in zip(*parts, strict=True)]

    def _select_rows(self, rows: np.ndarray) -> list[torch.Tensor]:
        index = torch.from_numpy(rows)
        return [t.index_select(0, index) for t in self._tensors]

    def _make_batch(self, tensors: Sequence[torch.Tensor]) -> Any:
        return dict(zip(self._names, tensors, strict=True)) if self._names else tuple(tensors)


class MappedSource:
    """Arrays of equal length, some of which stay in files; `take` copies rows. Batches are those of ArraySource."""

    is_thread_safe, reads_disk, is_same_on_all_ranks = True, True, True

    def __init__(self, parts: Sequence[Any], names: Sequence[str] = ()) -> None:
        self._names = tuple(names)
        arrays = [part.open() if isinstance(part, MappedFile) else np.asarray(part) for part in parts]
        self._arrays = [(array, array.dtype.newbyteorder("=")) for array in arrays]  # torch has native order only

    def __len__(self) -> int:
        return len(self._arrays[0][0])

    def take(self, rows: np.ndarray) -> Any:
        """Return a batch, with one copy of the rows of each file."""
        tensors = tuple(
            torch.from_numpy(np.take(array, rows, axis=0).astype(dtype, copy=False)) for array, dtype in self._arrays
        )
        return dict(zip(self._names, tensors, strict=True)) if self._names else tensors


DATASET_NOTE = "the Dataset raised this for"
"""Beginning of the note on an error of the user's Dataset."""


class DatasetSource:
    """Map-style torch Dataset; a batch is collated from its samples by torch's default collation."""

    is_thread_safe, reads_disk, is_same_on_all_ranks = False, False, False

    def __init__(self, dataset: Any, columns: ColumnSelection | None = None) -> None:
        self._dataset, self._columns = dataset, columns or ColumnSelection()

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, rows: np.ndarray) -> Any:
        """Return a batch of samples, loaded one by one or by the dataset's `__getitems__`."""
        return self.take_seeded(rows, _ignore_row)

    def take_seeded(self, rows: np.ndarray, seed_row: Callable[[int], None]) -> Any:
        """Return a batch of samples; call `seed_row` before each is loaded, or before all by `__getitems__`."""
        return collate_samples(self._load_samples(rows.tolist(), seed_row), self._columns)

    def _load_samples(self, rows: list[int], seed_row: Callable[[int], None]) -> Any:
        load_samples = getattr(self._dataset, "__getitems__", None)
        if load_samples is None:
            return [self._load_sample(row, seed_row) for row in rows]
        seed_row(rows[0])
        try:
            return load_samples(rows)
        except Exception as error:
            error.add_note(f"{DATASET_NOTE} the rows {_format_rows(rows)}")
            raise

    def _load_sample(self, row: int, seed_row: Callable[[int], None]) -> Any:
        seed_row(row)
        try:
            return self._dataset[row]
        except Exception as error:
            error.add_note(f"{DATASET_NOTE} row {row}")
            raise


class HubSource(DatasetSource):
    """Dataset of Hugging Face's ``datasets``: a batch is read from the arrow table at once.

    Without a format, columns become tensors. A user's format or transform is kept, and its samples are collated like
    those of any Dataset.
    """

    reads_disk = True

    def __init__(self, dataset: Any, columns: ColumnSelection | None = None) -> None:
        columns = check_hub_columns(dataset, columns or ColumnSelection())
        if columns.is_given:
            dataset = dataset.select_columns([*(columns.features or ()), *columns.target_names])
        self._reads_whole_batches = get_hub_format(dataset) is None and columns.collate_fn is None
        self.is_thread_safe = self.is_same_on_all_ranks = self._reads_whole_batches  # a transform is user code
        super().__init__(dataset.with_format("torch") if self._reads_whole_batches else dataset, columns)

    def take(self, rows: np.ndarray) -> Any:
        """Return a dict of tensors by column, or (inputs..., target) if a target column was given."""
        if not self._reads_whole_batches:
            return super().take(rows)
        batch = self._dataset[rows.tolist()]
        for name, values in batch.items():
            if isinstance(values, list):
                _raise_ragged_column(name, values, rows)
        return self._columns.split_batch(batch)


def _raise_ragged_column(name: str, values: list[Any], rows: np.ndarray) -> NoReturn:
    shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__ for value in values]
    other = next((k for k, shape in enumerate(shapes) if shape != shapes[0]), 0)
    raise ValueError(
        f"column {name!r} differs in shape from row to row ({shapes[0]} in row {rows[0]}, {shapes[other]} in row "
        f"{rows[other]}), so rows can't be stacked. Pad them to one length in a .map(...), or collate them yourself in "
        ".with_transform(...)"
    )


def is_hub_dataset(data: Any) -> bool:
    """Return whether this is a map-style Dataset of Hugging Face's ``datasets``, without importing it."""
    return any(
        kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset" for kind in type(data).__mro__
    )


def get_hub_format(dataset: Any) -> str | None:
    """Return the format that a user has set: "torch", "custom" (a transform), ..., or None."""
    kind: str | None = dataset.format["type"]
    return kind


def check_hub_columns(dataset: Any, columns: ColumnSelection) -> ColumnSelection:
    """Return `columns` with all names resolved. Raises TypeError for columns of text, which no tensor can hold."""
    if columns.is_given:
        columns = columns.resolve(dataset.column_names)
    if get_hub_format(dataset) is not None or columns.collate_fn is not None:
        return columns  # the user's format or function converts them
    chosen = [*(columns.features or ()), *columns.target_names] if columns.is_given else dataset.column_names
    text = {name: _describe_feature(dataset.features[name]) for name in chosen if _is_text(dataset.features[name])}
    if text:
        named = ", ".join(f"{name!r} ({dtype})" for name, dtype in text.items())
        raise TypeError(
            f"columns {named} hold text, and tensors hold numbers only. Convert them in a .map(...) (a tokenizer, "
            f"class_encode_column for labels), then drop them: dataset.remove_columns({list(text)})"
        )
    return columns


def _is_text(feature: Any) -> bool:
    """Return whether a column's type is text or bytes, or a list of these."""
    inner = getattr(feature, "feature", None)
    return _is_text(inner) if inner is not None else _describe_feature(feature) in _TEXT_DTYPES


def _describe_feature(feature: Any) -> str:
    inner = getattr(feature, "feature", None)
    return (
        f"lists of {_describe_feature(inner)}"
        if inner is not None
        else str(getattr(feature, "dtype", type(feature).__name__))
    )


_FUNCTION_SEED = 0
_TEXT_DTYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def as_source(data: Any, columns: ColumnSelection | None = None, name: str = "data") -> RowSource | StreamSource:
    """Return the source for any data that :meth:`dtkit.Cluster.partition` takes; a stream if its length is unknown.

    Errors call the data by `name`.
    """
    columns = columns or ColumnSelection()
    if isinstance(data, StreamSource) or (hasattr(data, "take") and hasattr(data, "is_thread_safe")):
        return data  # type: ignore[no-any-return]  # a source already
    data = paths.describe_files(data, columns, name)
    if isinstance(data, ParquetFiles):
        return ParquetSource(data)
    data = frames.select_arrays(data, columns)
    names = tuple(data) if isinstance(data, dict) else ()
    arrays = list(data.values()) if isinstance(data, dict) else _as_arrays(data, columns)
    if arrays is None:
        return _make_sample_source(data, columns, name)
    if any(isinstance(part, (MappedFile, np.memmap)) for part in arrays):
        return MappedSource(arrays, names)
    return ArraySource([torch.as_tensor(part) for part in arrays], names)


def _make_sample_source(data: Any, columns: ColumnSelection, name: str) -> RowSource | StreamSource:
    """Return the source for data that yields samples: a Dataset, or a stream without rows by number."""
    if is_hub_dataset(data):
        return HubSource(data, columns)
    if is_iterable_only(data):
        return StreamSource(data, columns)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data, columns)
    raise TypeError(
        f"{name} is {name_type(data)}; it must be a tuple of arrays, a DataFrame, an iterable of samples, or a "
        "map-style Dataset (with __len__ and __getitem__). A function that returns one of these will do, too"
    )


def _as_arrays(data: Any, columns: ColumnSelection) -> Sequence[Any] | None:
    """Return the arrays that `data` is or can be converted to; None for anything else."""
    if frames.is_pandas(data):
        return frames.convert_frame(data, columns)[0]
    if isinstance(data, (np.ndarray, torch.Tensor, MappedFile)):
        return (data,)
    if type(data) is torch.utils.data.TensorDataset and columns.collate_fn is None:  # a subclass may change its samples
        return data.tensors
    if is_sample_list(data):
        return None
    if isinstance(data, (tuple, list)):
        return frames.convert_pandas_parts(data, columns.float_dtype)
    return None


def load_source(function: Callable[..., Any], columns: ColumnSelection, name: str = "data") -> RowSource | StreamSource:
    """Return the source for a user's function on this engine; a stream calls the function for each job.

    All engines call the function with the same seeds, so that random data are equal on all of them. The function is
    the user's argument `name`.
    """
    if is_stream_factory(function):
        return StreamSource(function, columns)
    with preserve_generators():
        seed_generators(_FUNCTION_SEED)
        data = function()
    if is_iterable_only(data):
        return StreamSource(function, columns)
    source = as_source(data, columns, f"what the function {name} returned")
    assert not isinstance(source, StreamSource)
    source.is_same_on_all_ranks = False  # it may read different files on each host, or draw from its own generator
    return source


def _ignore_row(_row: int) -> None:
    pass


def _format_rows(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:8]))
    return f"{shown}, ... ({len(rows)} in all)" if len(rows) > 8 else shown


def to_device(batch: Any, device: torch.device, float_dtype: torch.dtype | None = None) -> Any:
    """Return a nested batch on the device, with its floating-point numbers in `float_dtype` if that is given."""
    if float_dtype is not None:
        batch = convert_floats(batch, float_dtype)
    if device.type == "cpu" and type(batch) is tuple and all(type(t) is torch.Tensor and t.is_cpu for t in batch):
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def convert_floats(batch: Any, dtype: torch.dtype) -> Any:
    """Return a nested batch with its floating-point numbers in `dtype`."""
    return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nested batch with `function` applied to each tensor."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {k: map_tensors(v, function) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [map_tensors(v, function) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # a namedtuple, or not
    return batch


def repeat_rows(batch: Any, num_rows: int) -> Any:
    """Return a nested batch of `num_rows` rows, which repeats the rows of `batch`; each tensor has a row per sample."""

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(0, torch.arange(num_rows) % len(tensor)) if tensor.dim() else tensor

    return map_tensors(batch, repeat)

"""Inspection of data in the notebook: which kinds users may pass, and what is sent to the engines for them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting
from dtkit._util.formatting import name_type
from dtkit._util.function_checks import check_takes
from dtkit.data import columns as frames
from dtkit.data.columns import ColumnSelection, is_sample_list
from dtkit.data.partition import as_labels
from dtkit.engine.data import paths
from dtkit.engine.data.memmap import FileBackedData, MappedFile
from dtkit.engine.data.parquet import ParquetFiles, ParquetSource

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_FIRST_ROWS = 8
"""Rows that a trial in the notebook takes."""
_MAX_SHAPES_CHARS = 200
_MAX_LABELS = 2**24  # labels read from a file or an arrow table, only for the figure


@dataclasses.dataclass(frozen=True)
class NotebookData:
    """Data with numbered rows, inspected and ready to be sent."""

    data: Any
    num_samples: int
    columns: ColumnSelection
    labels: Any = None
    note: str = ""
    reads_in_blocks: bool = False
    """Whether rows are read in blocks, which is faster for contiguous shards."""


def inspect_data(
    data: Any, column_selection: ColumnSelection, *, for_evaluation: bool = False, name: str = "data"
) -> NotebookData:
    """Inspect `data`; return its properties and the form to send.

    Raises ValueError or TypeError for unusable data, which they call by `name`, the user's argument.
    """
    data = paths.describe_files(data, column_selection, name)
    if isinstance(data, ParquetFiles):
        return _inspect_parquet(data, want_labels=not for_evaluation)
    if _is_hugging_face_dataset(data):
        return _inspect_hugging_face_dataset(data, column_selection)
    if frames.is_pandas(data):
        arrays, columns = frames.convert_frame(data, column_selection)
        return _inspect_arrays(arrays, columns, frames.describe_arrays(arrays, columns), name=name)
    if isinstance(data, dict):
        return _inspect_named_arrays(data, column_selection, name)
    if hasattr(data, "to_pandas"):
        raise TypeError(f"{name} is a {type(data).__module__}.{type(data).__name__}; give {name}.to_pandas()")
    if (parts := _as_tuple_of_arrays(data, column_selection)) is not None:
        return _inspect_plain_arrays(parts, column_selection, for_evaluation=for_evaluation, name=name)
    if hasattr(data, "named_parameters"):  # nn.Sequential has rows, too: its layers
        raise TypeError(
            f"{name} is a model, {type(data).__name__}; cluster.broadcast(model) places a model on the engines"
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, bytes)):
        return _inspect_samples(data, column_selection)
    raise TypeError(
        f"{name} is {name_type(data)}; it must be a tuple of arrays as in (X, y), a dict of arrays, a DataFrame, "
        "or a path of .npy or .parquet files. A map-style Dataset (with __len__ and __getitem__) and an iterable of "
        "samples will do, too, or a function that returns one of these on the engine"
    )


def _as_tuple_of_arrays(data: Any, columns: ColumnSelection) -> Any:
    """Return arrays without names as a tuple or list; None for any other data."""
    if type(data).__name__ == "TensorDataset" and hasattr(data, "tensors") and columns.collate_fn is None:
        return tuple(data.tensors)
    if hasattr(data, "__array__") or isinstance(data, MappedFile):
        return (data,)
    return data if isinstance(data, (tuple, list)) and not is_sample_list(data) else None


def _inspect_plain_arrays(
    data: Sequence[Any], columns: ColumnSelection, *, for_evaluation: bool, name: str
) -> NotebookData:
    _refuse_collation(columns)
    if columns.is_given and not for_evaluation:
        raise ValueError(
            f"target={columns.target!r}, columns={columns.features!r} name columns of a table, but this data has "
            "arrays, of which the last is the target. Leave them out"
        )
    return _inspect_arrays(frames.convert_pandas_parts(data, columns.float_dtype), ColumnSelection(), name=name)


def _inspect_samples(data: Any, columns: ColumnSelection) -> NotebookData:
    """Inspect a Dataset or a list of samples."""
    if columns.collate_fn is not None and not callable(columns.collate_fn):
        raise TypeError(f"collate_fn={columns.collate_fn!r}; it must be a function from a list of samples to a batch")
    if columns.collate_fn is not None:
        check_takes("collate_fn", columns.collate_fn, ("samples",))
    is_changed = columns.is_given or columns.collate_fn is not None
    return NotebookData(_WithColumns(data, columns) if is_changed else data, len(data), columns)


def _refuse_collation(columns: ColumnSelection) -> None:
    if columns.collate_fn is not None:
        raise ValueError(
            "collate_fn= makes a batch of samples, but this data has arrays, of which a batch takes rows. Leave it "
            "out, or give a Dataset or a list of samples"
        )


def _inspect_arrays(data: Sequence[Any], columns: ColumnSelection, note: str = "", *, name: str) -> NotebookData:
    arrays, samples = _check_arrays(data, name)
    labels = None
    if len(arrays) > 1:
        last = arrays[-1]
        labels = as_labels(last.open() if isinstance(last, MappedFile) else last)
    return NotebookData(arrays, samples, columns, labels, note)


def _inspect_named_arrays(data: dict[str, Any], columns: ColumnSelection, name: str) -> NotebookData:
    """Inspect a dict of arrays, whose batches are dicts, or (inputs..., target) if columns were named."""
    _refuse_collation(columns)
    chosen = frames.select_arrays(data, columns)
    if not isinstance(chosen, dict):
        return dataclasses.replace(_inspect_arrays(chosen, ColumnSelection(), name=name), columns=columns)
    arrays, samples = _check_arrays(list(chosen.values()), name, list(chosen))
    named = dict(zip(chosen, arrays, strict=True))
    return NotebookData(named, samples, columns, as_labels(named["labels"]) if "labels" in named else None)


def _inspect_parquet(data: ParquetFiles, *, want_labels: bool) -> NotebookData:
    labels = None
    if want_labels and len(data.columns.target_names) == 1 and data.num_rows <= _MAX_LABELS:
        labels = as_labels(ParquetSource(data).read_target())
    return NotebookData(
        data, data.num_rows, data.columns, labels, f"read by row group from {data.display_name}", reads_in_blocks=True
    )


def _is_hugging_face_dataset(data: Any) -> bool:
    return any(k.__module__ == "datasets.arrow_dataset" and k.__name__ == "Dataset" for k in type(data).__mro__)


def _inspect_hugging_face_dataset(data: Any, column_selection: ColumnSelection) -> NotebookData:
    """Inspect a Dataset of ``datasets``. Engines map its files; a Dataset in memory is sent through shared memory."""
    from dtkit.engine.data.sources import check_hub_columns

    columns = check_hub_columns(data, column_selection)
    labels = None
    if len(columns.target_names) == 1 and len(data) <= _MAX_LABELS:
        name = columns.target_names[0]
        values = np.asarray(data.select_columns([name]).with_format("numpy")[:][name])
        labels = as_labels(values) if values.dtype.kind in "biuf" else None
    filenames = [file["filename"] for file in data.cache_files]
    dataset = _WithColumns(data, columns) if columns.is_given or columns.collate_fn is not None else data
    note = f"mapped by every engine from {formatting.format_count(len(filenames), 'arrow file')}" if filenames else ""
    return NotebookData(FileBackedData(filenames, dataset) if filenames else dataset, len(data), columns, labels, note)


class _WithColumns:
    """Dataset with selected columns, which is unpickled as a data source."""

    def __init__(self, data: Any, columns: ColumnSelection) -> None:
        self._data, self._columns = data, columns

    def __reduce__(self) -> tuple[Any, ...]:
        from dtkit.engine.data.sources import as_source

        return as_source, (self._data, self._columns)


def _check_arrays(data: Sequence[Any], name: str, keys: Sequence[Any] = ()) -> tuple[tuple[Any, ...], int]:
    arrays = []
    for k, array in zip(keys or range(len(data)), data, strict=True):
        if not (hasattr(array, "__array__") or isinstance(array, MappedFile)):
            raise TypeError(
                f"{name}[{k!r}] is {name_type(array)}; each part must be a numpy array or a tensor. "
                "Convert it with numpy.asarray"
            )
        if type(array).__module__.partition(".")[0] != "torch":
            array = _to_numeric_array(array if isinstance(array, MappedFile) else np.asarray(array), f"{name}[{k!r}]")  # noqa: PLW2901 - the same array in the one form that travels
        arrays.append(array)
    shapes = [tuple(a.shape) for a in arrays]
    if not shapes or any(not shape for shape in shapes):
        raise ValueError(
            f"{name} has arrays of shapes {shapes}; each must have rows. Give arrays of one dimension or more"
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"{name} has arrays of {', '.join(str(s[0]) for s in shapes)} rows (shapes {shapes}); all must have "
            "equally many, one per sample. Cut them to the same length"
        )
    return tuple(arrays), int(shapes[0][0])


def _to_numeric_array(array: Any, name: str) -> Any:
    if np.dtype(array.dtype).kind not in "biufc":
        raise TypeError(
            f"{name} has dtype {array.dtype}; tensors hold numbers only. Encode it first, as in "
            "numpy.unique(labels, return_inverse=True)[1]"
        )
    return array


def copy_first_rows(data: Any) -> Any:
    """Return a copy of the first rows of arrays, by themselves, in a tuple or in a dict; None for other data."""
    if type(data).__name__ == "TensorDataset" and hasattr(data, "tensors"):
        data = tuple(data.tensors)
    if isinstance(data, dict):
        named = {name: copy_first_rows(array) for name, array in data.items()}
        return None if any(rows is None for rows in named.values()) else named
    if isinstance(data, (tuple, list)) and not is_sample_list(data):
        parts = tuple(copy_first_rows(array) for array in data)
        return None if any(rows is None for rows in parts) else parts
    if frames.is_pandas(data) or frames.is_pandas(data, "Series"):
        return data.iloc[:NUM_FIRST_ROWS].copy()
    if type(data).__module__.partition(".")[0] == "torch" and hasattr(data, "clone"):
        return data[:NUM_FIRST_ROWS].clone()
    return np.array(data[:NUM_FIRST_ROWS]) if isinstance(data, np.ndarray) and data.ndim else None


def describe_shapes(data: Any) -> str:
    """Return the shapes and dtypes of arrays, the last of which is the target unless they have names.

    Such as ``(1440, 64) float32, target (1440,) int64``; an empty text for other data.
    """
    if isinstance(data, dict):
        named = list(data.items())
    elif isinstance(data, tuple):
        named = [("target" if 0 < k == len(data) - 1 else "", array) for k, array in enumerate(data)]
    else:
        return ""
    if not all(hasattr(array, "shape") and hasattr(array, "dtype") for _, array in named):
        return ""
    shapes = [f"{name} {tuple(array.shape)} {_name_dtype(array.dtype)}" for name, array in named]
    return formatting.sanitize_text(", ".join(map(str.strip, shapes)), _MAX_SHAPES_CHARS)


def _name_dtype(dtype: Any) -> str:
    """Return the name of a dtype of torch or numpy. A mapped file has its code, such as ``<f4``."""
    return np.dtype(dtype).name if isinstance(dtype, str | np.dtype) else str(dtype).removeprefix("torch.")

"""Parquet files, read by row group, since the format gives no access to single rows.

Rows are numbered through all files in order. A batch is gathered from the row groups that have its rows. A cache of
limited size keeps decoded groups, so an engine with a contiguous shard reads only its own groups. Shuffling single rows
over many groups would read nearly every group for every batch. `shuffle_rows` therefore shuffles rows within windows of
randomly chosen groups, and a window fits into the cache. A shard that fits into one window is shuffled freely.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.data import columns as frames
from dtkit.engine.data.memmap import check_files_exist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from dtkit.data.columns import ColumnSelection

CACHE_BYTES = 256 * 1024**2
_WINDOWS_PER_CACHE = 4  # verify simulates several shards in one process, each in a window of its own


@dataclasses.dataclass(frozen=True)
class ParquetFiles:
    """Files and columns, in the form that is sent to an engine."""

    paths: tuple[str, ...]
    columns: ColumnSelection
    num_rows: int

    @property
    def display_name(self) -> str:
        """Name for messages."""
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more files"


def list_files(paths_or_folder: Any) -> tuple[str, ...]:
    """Return the files of a path, of a folder (its ``*.parquet``, sorted by name) or of several paths."""
    if isinstance(paths_or_folder, (tuple, list)):
        return tuple(itertools.chain.from_iterable(map(list_files, paths_or_folder)))
    path = Path(paths_or_folder).absolute()
    check_files_exist([str(path)])
    if not path.is_dir():
        return (str(path),)
    files = tuple(str(part) for part in sorted(path.glob("*.parquet")))
    if not files:
        raise FileNotFoundError(f"{path} has no file named *.parquet; give the files themselves, as a list")
    return files


def describe_parquet(paths_or_folder: Any, columns: ColumnSelection) -> ParquetFiles:
    """Check the columns by the files' footers, without reading rows. Raises ValueError or TypeError."""
    paths = list_files(paths_or_folder)
    opened = [_open_file(path) for path in paths]
    schema = opened[0].schema_arrow
    chosen = frames.require_target(columns, schema.names)
    for path, file in zip(paths, opened, strict=True):
        if not file.schema_arrow.equals(schema):
            raise ValueError(f"{path} differs in columns or types from {paths[0]}; all files of a table must be alike")
    _check_types(schema, chosen)
    _check_no_missing(opened, chosen)
    return ParquetFiles(paths, chosen, sum(file.metadata.num_rows for file in opened))


class ParquetSource:
    """Rows of parquet files; a batch is (features, target). It is thread-safe."""

    is_thread_safe, reads_disk, is_same_on_all_ranks = True, True, True

    def __init__(self, parquet_files: ParquetFiles, cache_bytes: int = CACHE_BYTES) -> None:
        check_files_exist(parquet_files.paths)
        self._parquet_files = parquet_files
        self._files = [_open_file(path) for path in parquet_files.paths]
        self._columns = parquet_files.columns
        self._row_groups = [(f, g) for f, file in enumerate(self._files) for g in range(file.metadata.num_row_groups)]
        sizes = [self._files[f].metadata.row_group(g).num_rows for f, g in self._row_groups]
        self._group_starts = list(itertools.accumulate(sizes, initial=0))
        if len(self) != parquet_files.num_rows:
            raise ValueError(
                f"{parquet_files.display_name} has {len(self):,} rows here and {parquet_files.num_rows:,} in the "
                "notebook; copy it again"
            )
        self._cache_bytes = cache_bytes
        self._cached_groups: collections.OrderedDict[int, tuple[torch.Tensor, ...]] = collections.OrderedDict()
        # locks: for a few assignments
        self._lock = threading.Lock()
        self.groups_read: collections.Counter[int] = collections.Counter()
        largest = max(sizes, default=0) * self._compute_row_bytes()
        self.groups_per_window = max(1, cache_bytes // _WINDOWS_PER_CACHE // max(1, largest))
        """Number of row groups within which rows are shuffled."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the files where the source is sent, as on an engine that replaces a lost one."""
        return type(self), (self._parquet_files, self._cache_bytes)

    def __len__(self) -> int:
        return int(self._group_starts[-1])

    def take(self, rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Return a batch of these rows. Each group that has some of them is visited once."""
        import torch

        groups = self._find_groups(rows)
        batch: tuple[torch.Tensor, ...] = ()
        with self._lock:
            for group in np.unique(groups).tolist():
                places = torch.from_numpy(np.flatnonzero(groups == group))
                within = torch.from_numpy(rows.astype(np.int64))[places] - self._group_starts[group]
                parts = self._get_group(group)
                batch = batch or tuple(part.new_empty((len(rows), *part.shape[1:])) for part in parts)
                for whole, part in zip(batch, parts, strict=True):
                    whole[places] = part[within]
        return batch

    def shuffle_rows(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return `rows` in a random order in which neighbors are from few groups. It depends only on `rng`."""
        group_positions = rng.permutation(len(self._row_groups))
        window = group_positions[self._find_groups(rows)] // self.groups_per_window
        shuffled: np.ndarray = rows[np.lexsort((rng.permutation(len(rows)), window))]
        return shuffled

    def _find_groups(self, rows: np.ndarray) -> np.ndarray:
        groups: np.ndarray = np.searchsorted(self._group_starts, rows, side="right") - 1
        return groups

    def _get_group(self, group: int) -> tuple[torch.Tensor, ...]:
        """Return a decoded group, from the cache or from its file."""
        if group in self._cached_groups:
            self._cached_groups.move_to_end(group)
            return self._cached_groups[group]
        parts = self._cached_groups[group] = self._read_group(group)
        cached_bytes = sum(part.nbytes for group_parts in self._cached_groups.values() for part in group_parts)
        while cached_bytes > self._cache_bytes and len(self._cached_groups) > 2:  # a batch may need two windows
            _, dropped = self._cached_groups.popitem(last=False)
            cached_bytes -= sum(part.nbytes for part in dropped)
        return parts

    def _read_group(self, group: int) -> tuple[torch.Tensor, ...]:
        import torch

        self.groups_read[group] += 1
        file, number = self._row_groups[group]
        columns = self._columns
        names = [*(columns.features or ()), *columns.target_names]
        table = self._files[file].read_row_group(number, columns=names, use_threads=False)
        arrays = {name: table.column(name).to_numpy() for name in names}
        _check_no_nan(arrays, self._group_starts[group])
        x = frames.stack_columns([arrays[name] for name in columns.features or ()], columns.float_dtype)
        targets = [frames.convert_target(arrays[name], columns.float_dtype) for name in columns.target_names]
        if not targets:
            return (torch.from_numpy(x),)
        y = targets[0] if isinstance(columns.target, str) else frames.stack_columns(targets, columns.float_dtype)
        return torch.from_numpy(x), torch.from_numpy(y)

    def _compute_row_bytes(self) -> int:
        names = (*(self._columns.features or ()), *self._columns.target_names)
        return 8 * len(names)

    def read_target(self) -> np.ndarray:
        """Return the whole target, for a picture of classes. Only its column is read."""
        name = self._columns.target_names[0]
        parts = [file.read(columns=[name], use_threads=False).column(name).to_numpy() for file in self._files]
        return frames.convert_target(np.concatenate(parts), self._columns.float_dtype)


def _open_file(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError(
            f"{path} is read with pyarrow, which is not installed. Install it: pip install 'dtkit-jupyter[data]'"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {str(error).splitlines()[0]}") from None


def _check_types(schema: Any, columns: ColumnSelection) -> None:
    import pyarrow.types as kind

    def is_number(dtype: Any) -> bool:
        return bool(kind.is_integer(dtype) or kind.is_floating(dtype) or kind.is_boolean(dtype))

    names = (*(columns.features or ()), *columns.target_names)
    wrong = {name: str(schema.field(name).type) for name in names if not is_number(schema.field(name).type)}
    if wrong:
        frames.refuse_non_numeric(wrong)


def _check_no_missing(open_files: Sequence[Any], columns: ColumnSelection) -> None:
    """Raise ValueError for columns with missing values by their statistics, which a file may lack."""
    names = {*(columns.features or ()), *columns.target_names}
    missing: collections.Counter[Any] = collections.Counter()
    for chunk in _iterate_column_chunks(open_files):
        if chunk.path_in_schema in names and chunk.statistics is not None and chunk.statistics.has_null_count:
            missing[chunk.path_in_schema] += chunk.statistics.null_count
    if any_missing := +missing:
        frames.refuse_missing(any_missing)


def _iterate_column_chunks(open_files: Sequence[Any]) -> Iterator[Any]:
    """Yield the footers' entries for every column of every row group."""
    for file in open_files:
        for g in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(g)
            yield from (group.column(c) for c in range(group.num_columns))


def _check_no_nan(arrays: dict[Any, np.ndarray], first_row: int) -> None:
    """Raise ValueError for NaN in a group that was read. Footers count only missing values."""
    for name, array in arrays.items():
        if array.dtype.kind == "O":  # booleans with a null, in a file without statistics
            frames.refuse_missing({name: sum(value is None for value in array)})
        if array.dtype.kind == "f" and np.isnan(array).any():
            row = first_row + int(np.flatnonzero(np.isnan(array))[0])
            raise ValueError(
                f"column {name!r} is NaN in row {row:,}, which would make every parameter NaN. Fill it or drop the row "
                "before the file is written"
            )

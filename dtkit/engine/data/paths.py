"""Paths that users pass as data; engines open the files. Doesn't need torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.data.columns import is_sample_list
from dtkit.engine.data import memmap, parquet

if TYPE_CHECKING:
    from dtkit.data.columns import ColumnSelection

_PARQUET_SUFFIXES = (".parquet", ".pq")


def describe_files(data: Any, columns: ColumnSelection, name: str = "data") -> Any:
    """Return `data` with paths and mapped arrays replaced by descriptions that an engine opens.

    A path is that of a ``.npy`` file, a parquet file or a folder of parquet files. Several parquet paths are one table.
    Raises FileNotFoundError, and ValueError or TypeError for unsuitable content; errors call the data by `name`.
    """
    if _is_path(data):
        return parquet.describe_parquet(data, columns) if _is_parquet(data) else _describe_npy(data, name)
    if isinstance(data, np.memmap):
        return memmap.describe_memmap(data) or data
    if isinstance(data, (tuple, list)) and not is_sample_list(data):
        if data and all(_is_path(part) and _is_parquet(part) for part in data):
            return parquet.describe_parquet(data, columns)
        return tuple(_describe_part(part, name) for part in data)
    return data


def _describe_part(part: Any, name: str) -> Any:
    """Describe one array of a tuple."""
    if _is_path(part):
        return _describe_npy(part, name)
    return (memmap.describe_memmap(part) or part) if isinstance(part, np.memmap) else part


def _describe_npy(path: Any, name: str) -> memmap.MappedFile:
    if Path(path).suffix != ".npy":
        raise ValueError(
            f"{name}={os.fspath(path)!r} is not supported: give a .npy file, a .parquet file or a folder of .parquet "
            "files. Or load it yourself, and give the arrays, or a function that loads them"
        )
    mapped_file = memmap.describe_memmap(memmap.load_npy(str(path)))
    assert mapped_file is not None, "a file that was just mapped has a name"
    return mapped_file


def _is_path(data: Any) -> bool:
    return isinstance(data, (str, os.PathLike))


def _is_parquet(path: Any) -> bool:
    return Path(path).suffix in _PARQUET_SUFFIXES or Path(path).is_dir()

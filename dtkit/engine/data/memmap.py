"""Arrays that stay in their file: each engine maps it and reads the rows that it needs, when it needs them.

What travels to an engine is where the numbers lie (:class:`MappedFile`), not the numbers. Engines of one host share the
pages that the system has read. The mapping is read-only, so that it costs no memory of the process's own and a limit on
that memory does not count it.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class MappedFile:
    """An array in a file: what a process of any host that sees the file needs to map it."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Bytes from the start of the file to the array's first element."""
    file_bytes: int
    """The file's size, by which another file of the same name is noticed."""

    def open(self) -> np.ndarray:
        """The array, read-only. Raises FileNotFoundError, or ValueError where the file has another size."""
        check_files_exist([self.path])
        size = Path(self.path).stat().st_size
        if size != self.file_bytes:
            raise ValueError(
                f"{self.path} has {size:,} bytes on {socket.gethostname()} and {self.file_bytes:,} in the notebook: "
                "not the same file. Copy it there anew, or partition again"
            )
        whole = np.memmap(self.path, dtype=np.uint8, mode="r")
        return np.ndarray(self.shape, self.dtype, whole.data, self.offset, self.strides)


def load_npy(path: str) -> np.memmap[Any, Any]:
    """Map a ``.npy`` file. Raise what :func:`check_files_exist` raises, and TypeError for an array of objects."""
    check_files_exist([path])
    try:
        found: np.memmap[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise TypeError(f"{path} can't be mapped as an array: {error}. Save numbers, as in np.save(path, X)") from None
    return found


def describe_memmap(array: np.memmap[Any, Any]) -> MappedFile | None:
    """Where a mapped array, or a part of one, lies in its file; None for one whose changes stay in this process."""
    pages = getattr(array, "_mmap", None)
    if pages is None or array.filename is None or array.mode == "c":
        return None
    begin = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    # What numpy maps starts at the page that holds the offset asked for; an array cut from it keeps that offset.
    mapped_from = array.offset - array.offset % _get_allocation_granularity()
    offset = mapped_from + array.ctypes.data - begin
    path = str(Path(array.filename).resolve())
    size = Path(path).stat().st_size
    return MappedFile(path, array.dtype.str, tuple(array.shape), tuple(array.strides), offset, size)


def check_files_exist(paths: Sequence[str]) -> None:
    """Raise FileNotFoundError where a file does not exist on this host."""
    for path in paths:
        if not os.path.exists(path):  # noqa: PTH110 - a path may be of any type that os takes
            raise FileNotFoundError(
                f"{path} does not exist on {socket.gethostname()}. Engines read data in files themselves: put it "
                "where every host sees it under the same path, or give the arrays instead"
            )


class FileBackedData:
    """An object that reads files where it is unpickled: a missing one is then named before the object looks for it."""

    def __init__(self, paths: Sequence[str], data: Any) -> None:
        self.paths, self.data = tuple(paths), data

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_data, (_FileCheck(self.paths), self.data)  # pickle builds the arguments in this order


class _FileCheck:
    """Pickles as a check that these files exist."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths

    def __reduce__(self) -> tuple[Any, ...]:
        return check_files_exist, (self._paths,)


def _unpickle_data(_: None, data: Any) -> Any:
    """What an :class:`FileBackedData` unpickles to."""
    return data


def _get_allocation_granularity() -> int:
    import mmap

    return mmap.ALLOCATIONGRANULARITY

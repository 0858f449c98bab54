"""Arrays that stay in their file. Each engine maps the file, and reads rows when it needs them.

An engine receives the position of the array (:class:`MappedFile`), not its numbers. Engines of one host share the pages
that the system has read. The mapping is read-only, so it doesn't count as the process's own memory.
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
    """Position of an array in a file, from which any host that has the file can map the array."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Bytes from the start of the file to the array's first element."""
    file_bytes: int
    """Size of the file, to detect another file of the same name."""

    def open(self) -> np.ndarray:
        """Return the array, read-only. Raises FileNotFoundError, or ValueError if the file has another size."""
        check_files_exist([self.path])
        size = Path(self.path).stat().st_size
        if size != self.file_bytes:
            raise ValueError(
                f"{self.path} has {size:,} bytes on {socket.gethostname()} and {self.file_bytes:,} in the notebook: "
                "not the same file. Copy it there again, or partition again"
            )
        whole = np.memmap(self.path, dtype=np.uint8, mode="r")
        return np.ndarray(self.shape, self.dtype, whole.data, self.offset, self.strides)


def load_npy(path: str) -> np.memmap[Any, Any]:
    """Map a ``.npy`` file. Raises FileNotFoundError, and TypeError for an array of objects."""
    check_files_exist([path])
    try:
        array: np.memmap[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise TypeError(f"{path} can't be mapped as an array: {error}. Save numbers, as in np.save(path, X)") from None
    return array


def describe_memmap(array: np.memmap[Any, Any]) -> MappedFile | None:
    """Return the position of a mapped array in its file; None if its changes stay in this process."""
    pages = getattr(array, "_mmap", None)
    if pages is None or array.filename is None or array.mode == "c":
        return None
    begin = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    # numpy maps from the start of the page that the offset is in. A slice of the array has the same `offset`.
    mapped_from = array.offset - array.offset % _get_allocation_granularity()
    offset = mapped_from + array.ctypes.data - begin
    path = str(Path(array.filename).resolve())
    size = Path(path).stat().st_size
    return MappedFile(path, array.dtype.str, tuple(array.shape), tuple(array.strides), offset, size)


def check_files_exist(paths: Sequence[str]) -> None:
    """Raise FileNotFoundError if a file does not exist on this host."""
    for path in paths:
        if not os.path.exists(path):  # noqa: PTH110 - a path may be of any type that os takes
            raise FileNotFoundError(
                f"{path} does not exist on {socket.gethostname()}. Engines read files themselves: put it where every "
                "host has it under the same path, or give the arrays instead"
            )


class FileBackedData:
    """Object that reads files when it is unpickled. A missing file raises a clear error first."""

    def __init__(self, paths: Sequence[str], data: Any) -> None:
        self.paths, self.data = tuple(paths), data

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_data, (_FileCheck(self.paths), self.data)  # pickle builds the arguments in this order


class _FileCheck:
    """Object that pickles as a check that these files exist."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths

    def __reduce__(self) -> tuple[Any, ...]:
        return check_files_exist, (self._paths,)


def _unpickle_data(_: None, data: Any) -> Any:
    """Return the object to which a :class:`FileBackedData` unpickles."""
    return data


def _get_allocation_granularity() -> int:
    import mmap

    return mmap.ALLOCATIONGRANULARITY

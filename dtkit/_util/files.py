"""Files that a crash or a full disk never leaves half written."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def replace_file(path: Path, data: bytes | str) -> None:
    """Write a file that only this user can read. A file at `path` stays until the new one is complete."""
    descriptor, temporary_path = _create_temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on disk, and not only in the system's cache, when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's data, or a folder's list of files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendOnlyFile:
    """A private file that grows by whole records, as far as the disk has room.

    It replaces a file at `path` once its first record is complete. From then on its descriptor identifies it, so that a
    later file at the same path is not touched.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor, self._closed = path, -1, False
        self._close_descriptor: Callable[[], object] = bool
        self._temporary_path: Path | None = None
        self._written_bytes, self._unwritten = 0, b""
        # locks: while a record is written to a file
        self._lock = threading.Lock()
        self.write_error: str | None = None
        """Reason why records are not in the file yet; None if all are."""

    def append(self, data: bytes) -> None:
        """Append a record. If the disk is full, it is written with the next record."""
        with self._lock:
            if self._closed:
                return
            self._unwritten += data
            try:
                self._write()
            except OSError as error:
                self.write_error = error.strerror or str(error)

    def close(self) -> None:
        """Close the file and ignore later records. Idempotent."""
        with self._lock:
            self._closed = True
            self._close_descriptor()

    def _write(self) -> None:
        if self._descriptor < 0:
            self._open()
        if os.pwrite(self._descriptor, self._unwritten, self._written_bytes) < len(self._unwritten):
            self.write_error = os.strerror(errno.ENOSPC)  # the next write starts at the same place
            return
        if self._temporary_path is not None:
            self._temporary_path.replace(self._path)
            self._temporary_path = None
        self._written_bytes, self._unwritten, self.write_error = self._written_bytes + len(self._unwritten), b"", None

    def _open(self) -> None:
        self._descriptor, self._temporary_path = _create_temporary(self._path)
        self._close_descriptor = weakref.finalize(self, os.close, self._descriptor)


def _create_temporary(path: Path) -> tuple[int, Path]:
    """Create a file with a free name next to `path`, which only this user can read. Return (descriptor, path)."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    return descriptor, Path(name)

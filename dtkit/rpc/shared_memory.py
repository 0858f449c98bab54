"""Files in shared memory that every engine of the host maps: one copy of the data, not one per engine.

The notebook writes buffers into a file in /dev/shm and sends the small :class:`SharedBuffer`. Engines map the file
copy-on-write: reading costs no memory, and an engine that writes changes only its own pages.

A file is created exclusively, readable only by its user. Its space is reserved before a byte is written. So if shared
memory is too small (64 MB in a container, by default), an error is raised instead of SIGBUS. A temporary file then
takes its place.

A killed notebook can't delete its files. Their names therefore contain their owner's identity
(``dtkit-<uid>-<pid>-<start>-<random>``), and :func:`remove_orphans` deletes files whose owner has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import mmap
import os
import re
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import resources
from dtkit._util.process import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT = 64
"""Bytes of a cache line, which suit every vector instruction."""

_SHARED_MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - the system's shared memory; files in it are created exclusively
_FILENAME_PATTERN = re.compile(r"dtkit-(\d+)-(\d+)-(\d+)-([0-9a-f]{8})[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class SharedBuffer:
    """Address of buffers, from which engines of the same host map them."""

    path: str
    spans: tuple[tuple[int, int], ...]
    """Offset and length in bytes, by buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes that the file holds."""
        return max((offset + size for offset, size in self.spans), default=0)


def write_buffers(
    buffers: Sequence[Any], *, file_owner: ProcessId | None = None, directories: Sequence[str] | None = None
) -> SharedBuffer:
    """Copy `buffers` (contiguous, any type) into one new file.

    The file is deleted after its owner, by default this process, has ended. `directories` are tried in order; by
    default shared memory, then the folder of temporary files. Raises OSError if none of them has enough space.
    """
    views = [memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"") for buffer in buffers]
    spans = _compute_spans([view.nbytes for view in views])
    file_owner = file_owner or ProcessId.from_pid()
    refusals = []
    for directory in directories or get_default_directories():
        handle = SharedBuffer(str(Path(directory, _make_filename(file_owner))), spans)
        try:
            _check_memory(directory, handle.nbytes)
            _write_file(handle, views)
        except OSError as error:
            refusals.append(f"{directory}: {error.strerror}")
        else:
            return handle
    raise OSError(
        errno.ENOSPC,
        f"no room for {SharedBuffer('', spans).nbytes / 1e6:.0f} MB of data that engines are to share "
        f"({'; '.join(refusals)}). Free space, enlarge shared memory (docker run --shm-size) or set TMPDIR",
    )


def map_buffers(handle: SharedBuffer) -> list[memoryview]:
    """Map the file and return one writable view per buffer. Only these views keep the mapping alive.

    Pages are shared until they are written, and only this process sees what it writes. Raises OSError if the file is
    gone, belongs to another user or is too short.
    """
    descriptor = os.open(handle.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_file(handle, os.fstat(descriptor))
        size = max(handle.nbytes, 1)
        pages = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    view = memoryview(pages)
    return [view[offset : offset + size] for offset, size in handle.spans]


def remove_file(handle: SharedBuffer) -> None:
    """Delete the file, if it still exists. Mappings of it stay valid."""
    Path(handle.path).unlink(missing_ok=True)


def remove_owned_files(file_owner: ProcessId, directories: Sequence[str] | None = None) -> list[str]:
    """Delete every file of this owner, alive or not, and return the paths."""
    return _remove_files(file_owner.matches, directories)


def remove_orphans(directories: Sequence[str] | None = None) -> list[str]:
    """Delete this user's files whose owner has ended, and return the paths.

    Only regular files with this module's names, made on this host (and in this container), are deleted.
    """
    return _remove_files(lambda owner: not owner.is_alive, directories)


def get_default_directories() -> tuple[str, ...]:
    """Return shared memory, then the folder of temporary files."""
    return (_SHARED_MEMORY_FOLDER, tempfile.gettempdir())


def _compute_spans(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    spans, offset = [], 0
    for size in sizes:
        spans.append((offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(spans)


def _check_memory(directory: str, size: int) -> None:
    """Raise OSError if shared memory would exceed the free memory; the kernel would then kill processes."""
    free = resources.read_memory().free
    if directory == _SHARED_MEMORY_FOLDER and size > free:
        raise OSError(errno.ENOMEM, f"only {free / 1e6:.0f} MB of memory are free")


def _write_file(handle: SharedBuffer, views: Sequence[memoryview]) -> None:
    """Create, reserve and fill the file; delete it if any of these fails."""
    descriptor = os.open(handle.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _reserve(descriptor, max(handle.nbytes, 1))
        for (offset, _), view in zip(handle.spans, views, strict=True):
            _write_at(descriptor, view, offset)
    except BaseException:
        remove_file(handle)
        raise
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS: writing reports a full disk too, since nothing is written through a mapping
        os.ftruncate(descriptor, size)


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of `view`; the kernel takes at most 2 GB at a time."""
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _check_file(handle: SharedBuffer, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "not a file of this user; refusing to map it", handle.path)
    if status.st_size < handle.nbytes:  # beyond the end, reading a page is SIGBUS
        raise OSError(errno.EIO, f"holds {status.st_size} of {handle.nbytes} bytes; write it again", handle.path)


def _make_filename(file_owner: ProcessId) -> str:
    start_ms = round(1000 * file_owner.start_time)
    return f"dtkit-{os.getuid()}-{file_owner.pid}-{start_ms}-{_compute_host_digest()}{secrets.token_hex(8)}"


def _remove_files(should_remove: Callable[[ProcessId], bool], directories: Sequence[str] | None) -> list[str]:
    """Delete the files whose owner `should_remove` accepts, and return the paths."""
    removed = []
    for directory in directories or get_default_directories():
        for path, owner in _list_own_files(directory):
            if should_remove(owner):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    path.unlink()
                    removed.append(str(path))
    return removed


def _list_own_files(directory: str) -> list[tuple[Path, ProcessId]]:
    try:
        entries = list(Path(directory).iterdir())
    except OSError:  # missing, or not readable
        return []
    named = ((entry, _FILENAME_PATTERN.fullmatch(entry.name)) for entry in entries)
    return [(path, ProcessId(int(m[2]), int(m[3]) / 1000)) for path, m in named if m and _is_own_file(path, m)]


def _is_own_file(path: Path, name: re.Match[str]) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    is_this_user = int(name[1]) == status.st_uid == os.getuid()
    return is_this_user and stat.S_ISREG(status.st_mode) and name[4] == _compute_host_digest()


@functools.cache
def _compute_host_digest() -> str:
    """Return eight hexadecimal digits that identify this host and pid namespace.

    Pids mean nothing outside them. Several hosts or containers may see the same folder, and files of processes that
    live elsewhere must stay.
    """
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.blake2s(f"{socket.gethostname()} {namespace}".encode(), digest_size=4).hexdigest()

"""One file in shared memory that every engine of the host maps: one copy of the data, not one per engine.

The notebook writes buffers into a file in /dev/shm and sends the small :class:`Handle`; engines map it
copy-on-write, so reading costs no memory, and an engine that writes changes its own pages only.

A file is created exclusively, readable by its user alone, and its space is reserved before a byte is written:
a shared memory that is too small (64 MB in a container, by default) answers with an error and not with
SIGBUS. Then a temporary file takes its place, mapped just the same.

Nobody may be left to delete the file when a notebook is killed, so its name says on whose life it hangs
(``dtkit-<uid>-<pid>-<start>-<random>``) and :func:`remove_orphans` deletes files of processes that are gone.
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

import psutil

from dtkit.cluster import resources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT = 64
"""Bytes: a cache line, and enough for every vector instruction."""

_SHARED_MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - the system's shared memory; files in it are created exclusively
_FILENAME_PATTERN = re.compile(r"dtkit-(\d+)-(\d+)-(\d+)-([0-9a-f]{8})[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class ProcessId:
    """The process on whose life a file's life hangs; its start time tells it from a later one of that pid."""

    pid: int
    start_time: int
    """Clock ticks since boot on Linux, elsewhere milliseconds since the epoch."""

    @classmethod
    def from_pid(cls, pid: int | None = None) -> ProcessId:
        """The process `pid`, by default this one. Raises ProcessLookupError where there is none."""
        pid = os.getpid() if pid is None else pid
        start = _read_start_time(pid)
        if start is None:
            raise ProcessLookupError(errno.ESRCH, f"no process with pid {pid} is running; name one that is")
        return cls(pid, start)

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        return _read_start_time(self.pid) == self.start_time


@dataclasses.dataclass(frozen=True)
class SharedBuffer:
    """Where the buffers lie: what an engine of the same host needs to map them."""

    path: str
    spans: tuple[tuple[int, int], ...]
    """Offset and length in bytes, by buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return max((offset + size for offset, size in self.spans), default=0)


def write_buffers(
    buffers: Sequence[Any], *, file_owner: ProcessId | None = None, directories: Sequence[str] | None = None
) -> SharedBuffer:
    """Copy `buffers` (contiguous, any type) into one new file and say where they lie.

    `owner`: see :class:`ProcessId`; this process by default. `directories` are tried in order; by default shared
    memory and then the folder of temporary files. Raises OSError where none of them has the room.
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


class BufferMapping:
    """The reading side of a :class:`Handle`."""

    @staticmethod
    def open(handle: SharedBuffer) -> list[memoryview]:
        """Map the file; one writable view per buffer, in order. The views keep the mapping alive, nothing
        else does.

        Pages are shared until they are written, and a write is seen by this process alone. Raises OSError
        where the file is gone, belongs to somebody else or is shorter than the handle says.
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
    """Delete the file. Mappings of it stay valid; a file that is gone already is no error."""
    Path(handle.path).unlink(missing_ok=True)


def remove_owned_files(file_owner: ProcessId, directories: Sequence[str] | None = None) -> list[str]:
    """Delete every file that hangs on `owner`, alive or not; returns their paths."""
    return _remove_files(lambda other: other == file_owner, directories)


def remove_orphans(directories: Sequence[str] | None = None) -> list[str]:
    """Delete our user's files whose owner no longer runs; returns their paths.

    Only regular files with our naming, of our uid, made on this host (and in this container) are touched.
    """
    return _remove_files(lambda owner: not owner.is_alive, directories)


def get_default_directories() -> tuple[str, ...]:
    """Shared memory, then the folder of temporary files."""
    return (_SHARED_MEMORY_FOLDER, tempfile.gettempdir())


def _compute_spans(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    spans, offset = [], 0
    for size in sizes:
        spans.append((offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(spans)


def _check_memory(directory: str, size: int) -> None:
    """Shared memory counts as memory: beyond what is free, the kernel kills instead of answering."""
    free = resources.read_memory().free
    if directory == _SHARED_MEMORY_FOLDER and size > free:
        raise OSError(errno.ENOMEM, f"only {free / 1e6:.0f} MB of memory are free")


def _write_file(handle: SharedBuffer, views: Sequence[memoryview]) -> None:
    """Create, reserve, fill; leaves nothing behind when one of them fails."""
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
    """Write all of `view`: the kernel may take less at a time (2 GB at most)."""
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _check_file(handle: SharedBuffer, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "not a file of this user; refusing to map it", handle.path)
    if status.st_size < handle.nbytes:  # beyond the end, reading a page is SIGBUS
        raise OSError(errno.EIO, f"holds {status.st_size} of {handle.nbytes} bytes; write it again", handle.path)


def _make_filename(file_owner: ProcessId) -> str:
    return (
        f"dtkit-{os.getuid()}-{file_owner.pid}-{file_owner.start_time}-{_compute_host_digest()}{secrets.token_hex(8)}"
    )


def _remove_files(should_remove: Callable[[ProcessId], bool], directories: Sequence[str] | None) -> list[str]:
    """Delete our files whose owner is condemned."""
    gone = []
    for directory in directories or get_default_directories():
        for path, owner in _list_own_files(directory):
            if should_remove(owner):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    path.unlink()
                    gone.append(str(path))
    return gone


def _list_own_files(directory: str) -> list[tuple[Path, ProcessId]]:
    try:
        entries = list(Path(directory).iterdir())
    except OSError:  # no such folder, or not ours to read
        return []
    named = ((entry, _FILENAME_PATTERN.fullmatch(entry.name)) for entry in entries)
    return [(path, ProcessId(int(m[2]), int(m[3]))) for path, m in named if m and _is_own_file(path, m)]


def _is_own_file(path: Path, name: re.Match[str]) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    mine = int(name[1]) == status.st_uid == os.getuid()
    return mine and stat.S_ISREG(status.st_mode) and name[4] == _compute_host_digest()


@functools.cache
def _compute_host_digest() -> str:
    """Eight hexadecimal digits for this host and pid namespace.

    A pid means nothing outside them, and a folder for temporary files may be seen from many (a network file
    system, a container that shares the host's memory): the file of a living process there must not be swept
    here.
    """
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.blake2s(f"{socket.gethostname()} {namespace}".encode(), digest_size=4).hexdigest()


def _read_start_time(pid: int) -> int | None:
    """When the process started, as an exact integer; None for one that is gone or a zombie."""
    try:
        # The name in parentheses may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _read_start_time_by_psutil(pid)
    except ProcessLookupError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _read_start_time_by_psutil(pid: int) -> int | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return None

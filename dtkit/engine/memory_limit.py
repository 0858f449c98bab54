"""A limit on what an engine may allocate: too large a model is then an error there, and not the end of the host.

RLIMIT_DATA counts private writable memory. Reaching it makes torch raise a plain RuntimeError, and the process goes on.
On a GPU the limit is one of the device's memory, which torch's allocator keeps (CUDA itself maps far more than it uses,
so that the process has none).

The limit is on what users' work allocates. What dtkit needs to get out of a failure must not be refused for want of
memory. Above all threads, whose stacks of 8 MB count: a process group has three, and where the second one of gloo's
workers can't be started, C++ ends the process instead of raising (ProcessGroupGloo's constructor unwinds past the
first one, which runs). So the limit is lifted while groups are made and jobs let go of, and an answer has some room
beyond it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

LIMIT_ENV_VAR = "DTKIT_MEMORY_LIMIT"
_REPLY_HEADROOM_BYTES = (
    2**24
)  # bytes that there are at least between two calls, for an answer to leave and a request to come


def read_configured_limit() -> int | None:
    """The bytes that the environment allows; None for as many as there are."""
    text = os.environ.get(LIMIT_ENV_VAR)
    return None if text is None else int(text)


class MemoryLimit:
    """How much an engine's process may allocate: as much as the environment says, on top of what it has loaded."""

    def __init__(self) -> None:
        self._max_data_bytes: int | None = None  # of private data; None while there is no limit on it

    def activate(self, device: torch.device) -> None:
        """From now on. What this process holds by now is not counted."""
        limit = read_configured_limit()
        if limit is None:
            return
        if device.type == "cuda":
            import torch  # not by the notebook, which knows of limits before it needs torch

            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
            return
        self._max_data_bytes = _read_data_bytes() + limit
        _set_data_limit(self._max_data_bytes)

    @contextlib.contextmanager
    def enforce(self) -> Iterator[None]:
        """While users' work is done. Behind it there is room for an answer, however much that work has left."""
        if self._max_data_bytes is not None:
            _set_data_limit(self._max_data_bytes)
        try:
            yield
        finally:
            self._leave_headroom()

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """While dtkit sees to itself; see `lift_data_limit`. Behind it, too, there is room for an answer."""
        try:
            with lift_data_limit():
                yield
        finally:
            self._leave_headroom()

    def _leave_headroom(self) -> None:
        if self._max_data_bytes is not None:
            _set_data_limit(max(self._max_data_bytes, _read_data_bytes() + _REPLY_HEADROOM_BYTES))


@contextlib.contextmanager
def lift_data_limit() -> Iterator[None]:
    """While dtkit does what must not fail for want of memory, and is small beside a model."""
    if read_configured_limit() is None:  # a limit that there may be is none of ours
        yield
        return
    before, _ = resource.getrlimit(resource.RLIMIT_DATA)
    _set_data_limit(resource.RLIM_INFINITY)
    try:
        yield
    finally:
        _set_data_limit(before)


def _set_data_limit(max_bytes: int) -> None:
    """Set the soft limit, which can be raised again as far as the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    finite = [limit for limit in (max_bytes, hard) if limit != resource.RLIM_INFINITY]  # which is -1
    resource.setrlimit(resource.RLIMIT_DATA, (min(finite, default=max_bytes), hard))


def _read_data_bytes() -> int:
    """This process's private data by now (VmData); 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
    return 1024 * found[0] if found else 0


def compute_data_left() -> int | None:
    """Bytes that this process may still allocate; None without a limit.

    What malloc keeps of freed memory counts: it is used first.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - _read_data_bytes() + _read_malloc_free_bytes())


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns: ten numbers, of which the ninth is the bytes that malloc has at hand."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("free", ctypes.c_size_t), ("last", ctypes.c_size_t))


def _read_malloc_free_bytes() -> int:
    """Bytes that were freed and that malloc keeps; 0 where it does not say (glibc before 2.33, or another libc)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().free)

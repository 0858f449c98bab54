"""Limit on an engine's memory, so that too large a model raises an error instead of exhausting the host.

RLIMIT_DATA counts private writable memory. At the limit torch raises a RuntimeError, and the process continues. On a
GPU torch's allocator limits the device's memory instead, since CUDA maps far more of the process's memory than it uses.

The limit is for users' code. During recovery from a failure, dtkit must not run out of memory, above all for threads:
their stacks of 8 MB count. A process group has three threads. If gloo can't start the second one, C++ ends the process.
So dtkit lifts the limit while it forms groups and frees jobs, and leaves headroom for the reply.
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
_REPLY_HEADROOM_BYTES = 2**24
"""Minimal free memory between two calls, for a reply and the next request."""


def read_configured_limit() -> int | None:
    """Return the limit in bytes from the environment, or None."""
    text = os.environ.get(LIMIT_ENV_VAR)
    return None if text is None else int(text)


class MemoryLimit:
    """Limit on the memory that an engine's process may allocate beyond its memory at the start."""

    def __init__(self) -> None:
        self._max_data_bytes: int | None = None  # of private data; None without a limit

    def activate(self, device: torch.device) -> None:
        """Begin to limit memory. Current memory doesn't count."""
        limit = read_configured_limit()
        if limit is None:
            return
        if device.type == "cuda":
            import torch  # the notebook uses this module without torch

            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
            return
        self._max_data_bytes = _read_data_bytes() + limit
        _set_data_limit(self._max_data_bytes)

    @contextlib.contextmanager
    def enforce(self) -> Iterator[None]:
        """Limit users' code within the context. Afterwards there is headroom for the reply."""
        if self._max_data_bytes is not None:
            _set_data_limit(self._max_data_bytes)
        try:
            yield
        finally:
            self._leave_headroom()

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Lift the limit for dtkit's code within the context; see `lift_data_limit`. Leaves headroom for the reply."""
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
    """Lift the limit within the context, for small allocations that must not fail."""
    if read_configured_limit() is None:  # an existing limit isn't dtkit's
        yield
        return
    before, _ = resource.getrlimit(resource.RLIMIT_DATA)
    _set_data_limit(resource.RLIM_INFINITY)
    try:
        yield
    finally:
        _set_data_limit(before)


def _set_data_limit(max_bytes: int) -> None:
    """Set the soft limit, at most to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    finite = [limit for limit in (max_bytes, hard) if limit != resource.RLIM_INFINITY]  # it is -1
    resource.setrlimit(resource.RLIMIT_DATA, (min(finite, default=max_bytes), hard))


def _read_data_bytes() -> int:
    """Return the bytes of this process's private data (VmData); 0 if unknown."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:")), 0)


def compute_data_left() -> int | None:
    """Return the bytes that this process may still allocate, with those that malloc has free; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - _read_data_bytes() + _read_malloc_free_bytes())


class _Mallinfo(ctypes.Structure):
    """Result of glibc's mallinfo2: ten numbers, of which the ninth is the bytes that malloc has free."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("free", ctypes.c_size_t), ("last", ctypes.c_size_t))


def _read_malloc_free_bytes() -> int:
    """Return the bytes that malloc has free; 0 if unknown (glibc before 2.33, or another libc)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().free)

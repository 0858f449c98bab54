"""A limit on what an engine may allocate: too large a model is then an error there, and not the end of the host.

RLIMIT_DATA counts private writable memory. Reaching it makes torch raise a plain RuntimeError, and the process goes on.
On a GPU the limit is one of the device's memory, which torch's allocator keeps (CUDA itself maps far more than it uses,
so that the process has none).
"""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLE = "DTKIT_MEMORY_LIMIT"


def given() -> int | None:
    """The bytes that the environment allows; None for as many as there are."""
    text = os.environ.get(VARIABLE)
    return None if text is None else int(text)


def limit_memory(device: torch.device) -> None:
    """Allow this process as many bytes as the environment says, on top of what it has loaded by now."""
    limit = given()
    if limit is None:
        return
    if device.type == "cuda":
        import torch  # not by the notebook, which knows of limits before it needs torch

        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + limit, hard))


def _data_bytes() -> int:
    """This process's private data by now (VmData); 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
    return 1024 * found[0] if found else 0


def data_left() -> int | None:
    """Bytes that this process may still allocate; None without a limit.

    What malloc keeps of freed memory counts: it is used first.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - _data_bytes() + _malloc_keeps())


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns: ten numbers, of which the ninth is the bytes that malloc has at hand."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("free", ctypes.c_size_t), ("last", ctypes.c_size_t))


def _malloc_keeps() -> int:
    """Bytes that were freed and that malloc keeps; 0 where it does not say (glibc before 2.33, or another libc)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().free)

"""Memory of an engine's device and process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import resources

if TYPE_CHECKING:
    import torch


def read_device_memory(device: torch.device) -> tuple[int, int]:
    """Return (total, free) bytes of the GPU, else of this host within its limits."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return total, free
    host_memory = resources.read_memory()
    return host_memory.total, host_memory.free


def read_used_memory(device: torch.device) -> int:
    """Return the bytes that this process has allocated on the GPU, else its resident set."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    import psutil

    return int(psutil.Process().memory_info().rss)

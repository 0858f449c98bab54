"""Memory that is available to an engine, and its peak.

Free memory is the device's, or the host's within its limits. A limit on the process (see
:mod:`dtkit.engine.memory_limit`) may leave less. The kernel counts the peak of resident memory (VmHWM), and can reset
it to the current value. So even a short peak between two readings counts.
"""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dtkit._util import resources
from dtkit._util.torch_private import get_storage_id, tree_leaves
from dtkit.engine import memory_limit, node_info
from dtkit.engine.observe.tensor_values import count_storage_bytes
from dtkit.planning.cost_model import AvailableMemory
from dtkit.planning.memory_report import MemoryUsage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PROC_SELF = Path("/proc/self")


def measure_available_memory(
    device: torch.device, models: Iterable[torch.nn.Module], *, tidy_up: bool = False
) -> AvailableMemory:
    """Return the free memory. `tidy_up` first frees unused memory, and counts the memory of an earlier job.

    `models` are on this engine and stay.
    """
    if tidy_up:
        release_unused_memory()
    _, free = node_info.read_device_memory(device)
    job_bytes = _count_job_bytes(device, models) if tidy_up else 0
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit = memory_limit.read_configured_limit()
        remaining = None if limit is None else max(0, limit - torch.cuda.memory_allocated(device))
        return AvailableMemory(free + unused, 0, job_bytes, remaining)
    return AvailableMemory(free, resources.read_free_swap(), job_bytes, memory_limit.compute_data_left())


def _take_smaller_limit(available: AvailableMemory) -> int:
    return available.free_bytes if available.limit_bytes is None else min(available.free_bytes, available.limit_bytes)


def release_unused_memory() -> None:
    """Return unused memory to the system."""
    gc.collect()
    resources.trim_malloc()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _count_job_bytes(device: torch.device, models: Iterable[torch.nn.Module]) -> int:
    """Return the bytes of the device's tensors outside of `models`: a job's, which the next run replaces.

    Data and the user's tensors count, too. Too large a number is better here, since it lets more runs start.
    """
    plain = (torch.Tensor, torch.nn.Parameter)  # others, such as lazy or fake tensors, may have no storage
    tensors = [obj for obj in gc.get_objects() if type(obj) in plain]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided and t.device.type == device.type]
    sizes = {get_storage_id(storage): storage.nbytes() for storage in storages}
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            sizes.pop(get_storage_id(tensor.untyped_storage()), None)
    return sum(sizes.values())


def reset_peak(device: torch.device) -> int | None:
    """Reset the peak and return the current bytes, or None if the system doesn't support it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_reserved(device)
    try:
        (_PROC_SELF / "clear_refs").write_text("5")  # proc(5): resets the peak
    except OSError:
        return None
    return _read_proc_status("VmRSS")


def read_peak(device: torch.device) -> int:
    """Return the peak in bytes since `reset_peak`."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _read_proc_status("VmHWM")


def _read_proc_status(name: str) -> int:
    """Return a size of /proc/self/status in bytes."""
    lines = (_PROC_SELF / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# -- memory of a job -----------------------------------------------------------------------------------------


class PeakMemoryTracker:
    """Growth of the process for one job: from before its creation to the peak during its steps.

    Other jobs may run in between, so each dispatch resets the peak.
    """

    def __init__(self, device: torch.device, sent_model: torch.nn.Module | None) -> None:
        """Start before the job is created. `sent_model` is the notebook's model if the engine keeps it."""
        release_unused_memory()
        self._device = device
        self._sent_model_bytes = (
            count_storage_bytes([*sent_model.parameters(), *sent_model.buffers()])
            if sent_model is not None and device.type == "cpu"
            else 0
        )
        self._limit_bytes = (
            memory_limit.compute_data_left()
            if device.type == "cpu"
            else _take_smaller_limit(measure_available_memory(device, ()))
        )
        self._bytes_before = reset_peak(device)
        self._peak_growth: int | None = None

    @contextlib.contextmanager
    def track_steps(self, snapshot_bytes: int = 0) -> Iterator[None]:
        """Track the steps within the context. Memory for snapshots doesn't count as growth."""
        snapshot_bytes = 0 if self._device.type == "cuda" else snapshot_bytes
        supported = reset_peak(self._device) is not None
        try:
            yield
        finally:
            if supported and self._bytes_before is not None:
                self._peak_growth = max(
                    self._peak_growth or 0, read_peak(self._device) - self._bytes_before - snapshot_bytes
                )

    def compute_spare_bytes(self) -> int | None:
        """Return the bytes that the steps leave of a limit on this process's memory; None without a limit."""
        if self._device.type == "cuda" or self._limit_bytes is None:
            return None
        return max(0, self._limit_bytes - (self._peak_growth or 0))

    def measure_usage(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, snapshot_bytes: int = 0
    ) -> MemoryUsage:
        """Return the bytes of the job's tensors, and the growth of the process."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
        return MemoryUsage(
            sent_model=self._sent_model_bytes,
            parameters=count_storage_bytes([*model.parameters(), *model.buffers()]),
            gradients=count_storage_bytes(gradients),
            optimizer=count_storage_bytes(state),
            process_growth=self._peak_growth,
            limit=self._limit_bytes,
            snapshots=snapshot_bytes,
        )

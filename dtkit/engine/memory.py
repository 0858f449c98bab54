"""The memory that an engine can get, and how much it has taken at most.

What is free is the device's, or the host's within its limits; a process with a limit of its own (see
:mod:`dtkit.engine.memory_limit`) can't get more than that leaves. The most that a process had resident is the kernel's
own count (VmHWM), which can be set back to what is resident now. So a peak between two readings is seen, however short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from dtkit.cluster import resources
from dtkit.engine import memory_limit, node_info
from dtkit.engine.observe.step_probe import to_local
from dtkit.planning.memory_report import MemoryUsage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PROC_SELF = Path("/proc/self")


@dataclasses.dataclass(frozen=True)
class AvailableMemory:
    """Memory that this engine can get: see :class:`dtkit.planning.cost_model.MemoryBudget`."""

    free_bytes: int
    swap_bytes: int
    job_bytes: int
    limit_bytes: int | None


def measure_available_memory(
    device: torch.device, models: Iterable[torch.nn.Module], *, tidy_up: bool = False
) -> AvailableMemory:
    """Memory free now. `tidy_up` first gives back what is unused, and counts what an earlier job holds.

    `models` are those that were placed here and stay.
    """
    if tidy_up:
        release_unused_memory()
    _, free = node_info.read_device_memory(device)
    held = _count_job_bytes(device, models) if tidy_up else 0
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit = memory_limit.read_configured_limit()
        left = None if limit is None else max(0, limit - torch.cuda.memory_allocated(device))
        return AvailableMemory(free + unused, 0, held, left)
    return AvailableMemory(free, resources.read_free_swap(), held, memory_limit.compute_data_left())


def _take_smaller_limit(available: AvailableMemory) -> int:
    return available.free_bytes if available.limit_bytes is None else min(available.free_bytes, available.limit_bytes)


def release_unused_memory() -> None:
    """Give back to the system what is not used any more."""
    gc.collect()
    resources.trim_malloc()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _count_job_bytes(device: torch.device, models: Iterable[torch.nn.Module]) -> int:
    """Bytes of the device's tensors that belong to no placed model: jobs', which the next run replaces.

    (And data, and the user's own: rather too much than too little, since this decides who is refused.)
    """
    plain = (torch.Tensor, torch.nn.Parameter)  # others, such as lazy or fake ones, may have no memory to ask for
    found = [thing for thing in gc.get_objects() if type(thing) in plain]
    found += [t.grad for t in found if t.is_leaf and t.grad is not None]
    storages = [t.untyped_storage() for t in found if t.layout is torch.strided and t.device.type == device.type]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}  # noqa: SLF001 - a storage's identity
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            sizes.pop(tensor.untyped_storage()._cdata, None)  # noqa: SLF001 - a storage's identity
    return sum(sizes.values())


def reset_peak(device: torch.device) -> int | None:
    """Begin to look for the most; bytes taken now. None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_reserved(device)
    try:
        (_PROC_SELF / "clear_refs").write_text("5")  # proc(5): the peak becomes what is resident now
    except OSError:
        return None
    return _read_proc_status("VmRSS")


def read_peak(device: torch.device) -> int:
    """The most bytes taken since `reset_peak`."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _read_proc_status("VmHWM")


def _read_proc_status(name: str) -> int:
    """One of the sizes in /proc/self/status, in bytes."""
    lines = (_PROC_SELF / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# --- what a job takes ---------------------------------------------------------------------------------------


class PeakMemoryTracker:
    """How much a process grows for one job: from just before the job is made to the most while it takes steps.

    Other jobs may work in between, so the kernel's count begins anew with each dispatch.
    """

    def __init__(self, device: torch.device, sent_model: torch.nn.Module | None) -> None:
        """`sent` is the model as it came, where the engine keeps it."""
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
        """While the job takes steps. What this process holds `beside` (snapshots, in bytes) is none of its growth."""
        snapshot_bytes = 0 if self._device.type == "cuda" else snapshot_bytes
        known = reset_peak(self._device) is not None and self._bytes_before is not None
        try:
            yield
        finally:
            if known and self._bytes_before is not None:
                self._peak_growth = max(
                    self._peak_growth or 0, read_peak(self._device) - self._bytes_before - snapshot_bytes
                )

    def compute_spare_bytes(self) -> int | None:
        """Bytes of a limit on this process's memory that its steps have left so far; None without such a limit."""
        if self._device.type == "cuda" or self._limit_bytes is None:
            return None
        return max(0, self._limit_bytes - (self._peak_growth or 0))

    def measure_usage(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, snapshot_bytes: int = 0
    ) -> MemoryUsage:
        """What there is now of the job's tensors, and how far the process grew."""
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


def count_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages on this rank, each once: of a tensor that is cut, those of the part that lies here."""
    found = {}
    for tensor in tensors:
        own = to_local(tensor)
        for part in (own._indices(), own._values()) if own.is_sparse else (own,):  # noqa: SLF001 - the public ones ask for a coalesced one
            storage = part.untyped_storage()
            found[storage._cdata] = storage.nbytes()  # noqa: SLF001 - a storage's identity
    return sum(found.values())

"""Choice of the number of engines, their devices, threads and backend."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

from dtkit._util import formatting, resources
from dtkit._util.stacklevel import find_caller_stacklevel
from dtkit.engine import memory_limit as limits
from dtkit.errors import ClusterWarning

if TYPE_CHECKING:
    from collections.abc import Sequence

_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""Size from which glibc gives an allocation a mapping of its own; the largest threshold that it accepts."""
_TRIM_THRESHOLD_BYTES = 2**40
"""Free memory at the end of the heap from which glibc gives it back to the system."""


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """Devices by rank, threads per engine, and backend of the collectives."""

    devices: tuple[str, ...]
    threads: int | None
    backend: str
    note: str = ""

    def make_environment(self, rank: int, memory_limit: int | None) -> dict[str, str]:
        """Return the environment of an engine's process."""
        variables = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        if self.devices[rank] == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
            # Backward allocates gradients in each step. Huge pages save most of the page faults.
            variables["THP_MEM_ALLOC_ENABLE"] = "1"
            # The next step reuses the memory that this one frees, so glibc must keep it. It is released when the job
            # ends.
            variables["MALLOC_MMAP_THRESHOLD_"] = str(_MMAP_THRESHOLD_BYTES)
            variables["MALLOC_TRIM_THRESHOLD_"] = str(_TRIM_THRESHOLD_BYTES)
        if memory_limit is not None:
            variables[limits.LIMIT_ENV_VAR] = str(memory_limit)
            # The limit counts freed memory that malloc keeps, while allocations with a mapping of their own are
            # released at once.
            variables["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
            variables.pop("MALLOC_TRIM_THRESHOLD_", None)
        return variables


def check_devices(device: str, threads: int | None) -> None:
    """Raise ValueError or TypeError for an impossible device or number of threads."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}; it must be 'auto', 'cpu' or 'cuda'")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise TypeError(f"threads={threads!r}; it must be an integer. Leave it out for cores // engines")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}; an engine needs at least one. Leave it out for cores // engines")


def plan_devices(num_engines: int, device: str, threads: int | None) -> DevicePlan:
    """Return devices for all engines: a GPU each if there are enough, else shared GPUs, else the CPU."""
    check_devices(device, threads)
    gpus = 0 if device == "cpu" else resources.count_gpus()
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda', but no CUDA device is usable here; use device='cpu' or 'auto'")
    threads = threads or max(1, resources.count_cores() // num_engines)
    if not gpus:
        return DevicePlan(("cpu",) * num_engines, threads, "gloo")
    devices = tuple(f"cuda:{r % gpus}" for r in range(num_engines))
    if num_engines <= gpus:
        return DevicePlan(devices, threads, "cpu:gloo,cuda:nccl")
    shared = formatting.format_count(gpus, "GPU")
    note = f"{num_engines} engines share {shared}: collectives go through gloo, since NCCL needs a GPU per rank."
    return DevicePlan(devices, threads, "gloo", note)


def plan_host_devices(hosts: Sequence[tuple[int, int, int]], device: str, threads: int | None) -> DevicePlan:
    """Return devices for engines on several hosts, given as (engines, cores, GPUs). All hosts get the same kind."""
    gpus = 0 if device == "cpu" else min(count for _, _, count in hosts)
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda', but not every host has a usable CUDA device; use device='cpu' or 'auto'")
    threads = threads or min(max(1, cores // max(1, engines)) for engines, cores, _ in hosts)
    if not gpus:
        return DevicePlan(("cpu",) * sum(engines for engines, _, _ in hosts), threads, "gloo")
    devices = tuple(f"cuda:{k % count}" for engines, _, count in hosts for k in range(engines))
    if all(engines <= count for engines, _, count in hosts):
        return DevicePlan(devices, threads, "cpu:gloo,cuda:nccl")
    note = "Engines share GPUs: collectives go through gloo, since NCCL needs a GPU per rank."
    return DevicePlan(devices, threads, "gloo", note)


def warn_of_too_many_engines(plan: DevicePlan) -> None:
    """Warn if engines on the CPU have to share cores."""
    cores, engines = resources.count_cores(), len(plan.devices)
    if engines > cores and plan.devices[0] == "cpu":
        warnings.warn(
            f"{engines} engines share {formatting.format_count(cores, 'core')}: they train correctly, and no faster "
            f"than {cores}. Cluster({engines}, threads=1) does not warn",
            ClusterWarning,
            stacklevel=find_caller_stacklevel(),
        )


def choose_num_engines(n: int | None, launcher: str) -> int:
    """Return `n` if this machine has memory for so many engines. By default, return the number that fits."""
    if n is None:
        return resources.compute_default_engines()
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"Cluster({n!r}): the number of engines must be an integer, or None for as many as fit")
    if n < 1:
        raise ValueError(f"Cluster({n}): a cluster needs at least one engine. Leave n out for as many as fit")
    most = resources.compute_max_engines()
    if launcher == "local" and n > most:
        cores, remedy = resources.count_cores(), f"Use Cluster({most}) or fewer"
        if cores < most:
            has = formatting.format_count(cores, "core")
            remedy = f"It has {has}, which more engines would share. Use Cluster({cores}), or at most Cluster({most})"
        raise ValueError(
            f"Cluster({n}): this machine's free memory ({formatting.format_bytes(resources.read_memory().free)}) "
            f"suffices for {most} engines at about {formatting.format_bytes(resources.ENGINE_BYTES)} each. {remedy}"
        )
    return n

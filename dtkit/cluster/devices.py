"""Which engine gets which device, how many threads, and what carries the collectives: arithmetic on what is here."""

from __future__ import annotations

import dataclasses

from dtkit._util import formatting
from dtkit.cluster import resources
from dtkit.engine import memory_limit as limits

_MMAP_THRESHOLD_BYTES = 32 * 2**20  # bytes: glibc maps larger ones by themselves whatever it is told
_TRIM_THRESHOLD_BYTES = 2**40  # bytes free at the heap's end, from which glibc gives them back


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """Devices by rank, threads, and what carries the collectives."""

    devices: tuple[str, ...]
    threads: int | None
    backend: str
    note: str = ""

    def make_environment(self, rank: int, memory_limit: int | None) -> dict[str, str]:
        """What an engine's process starts with. With more threads than cores torch spins (seven times slower)."""
        found = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        if self.devices[rank] == "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ""
            # Large tensors in huge pages: backward makes its gradients anew in each step, and touching 50 MB page by
            # page took 35 to 58 ms (100 MB of gradients: 1.26 of bare DDP's steps per second with it, 0.90 without).
            found["THP_MEM_ALLOC_ENABLE"] = "1"
            # What a step frees, the next one takes again: glibc gave it back to the system, and 30 MB of activations
            # came page by page (a pipeline: 0.94 of the bare loop's speed, 0.96 to 1.00 with it). A job's end trims.
            found["MALLOC_MMAP_THRESHOLD_"] = str(_MMAP_THRESHOLD_BYTES)
            found["MALLOC_TRIM_THRESHOLD_"] = str(_TRIM_THRESHOLD_BYTES)
        if memory_limit is not None:
            found[limits.LIMIT_ENV_VAR] = str(memory_limit)
            # The limit counts what malloc keeps of freed memory in pieces; what is mapped by itself goes back at once.
            found["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
            found.pop("MALLOC_TRIM_THRESHOLD_", None)
        return found


def plan_devices(num_engines: int, device: str, threads: int | None) -> DevicePlan:
    """Devices for `n` engines: a GPU each while there are enough, else shared ones, else the CPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}; it must be 'auto', 'cpu' or 'cuda'")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise TypeError(f"threads={threads!r}; it must be an integer. Leave it out for cores // engines")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}; an engine needs at least one. Leave it out for cores // engines")
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


def choose_num_engines(n: int | None, launcher: str) -> int:
    """The number of engines: as asked for, if this machine carries so many; by default what it carries."""
    if n is None:
        return resources.compute_default_engines()
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(
            f"Cluster({n!r}): the number of engines must be an integer, or None for what this machine carries"
        )
    if n < 1:
        raise ValueError(
            f"Cluster({n}): a cluster needs at least one engine. Leave n out for what this machine carries"
        )
    most = resources.compute_max_engines()
    if launcher == "local" and n > most:
        raise ValueError(
            f"Cluster({n}): this machine's free memory ({formatting.format_bytes(resources.read_memory().free)}) "
            f"carries {most} "
            f"engines at about {formatting.format_bytes(resources.ENGINE_BYTES)} each. Use Cluster({most}) or fewer"
        )
    return n

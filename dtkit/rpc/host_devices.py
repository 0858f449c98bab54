"""Devices of engines that replace others, maybe on another host: a GPU's number means nothing beyond its host."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def choose_devices(
    devices: Sequence[str], hosts: Sequence[str], num_gpus: Mapping[str, int], new_ranks: Sequence[int], backend: str
) -> tuple[str, ...]:
    """Return the device of each rank, with GPUs of their hosts for new ranks. They keep a number that is free.

    Raises ClusterError if a host has no GPU, or none that is free where the backend doesn't share them.
    """
    chosen = list(devices)
    placed = {rank for rank in range(len(chosen)) if rank not in new_ranks}
    for rank in new_ranks:
        if chosen[rank] != "cpu":
            used = collections.Counter(chosen[other] for other in placed if hosts[other] == hosts[rank])
            chosen[rank] = _choose_gpu(chosen[rank], used, hosts[rank], num_gpus[hosts[rank]], backend)
        placed.add(rank)
    return tuple(chosen)


def _choose_gpu(former: str, used: Mapping[str, int], host: str, num_gpus: int, backend: str) -> str:
    gpus = [f"cuda:{k}" for k in range(num_gpus)]
    if not gpus:
        raise ClusterError(
            f"{host} took the place of a lost host, and has no GPU. Go on without the lost ranks, "
            "with on_failure='shrink', or start another cluster"
        )
    if former in gpus and not used.get(former):
        return former
    least_used = min(gpus, key=lambda gpu: used.get(gpu, 0))
    if used.get(least_used) and "nccl" in backend:
        raise ClusterError(
            f"{host} has {formatting.format_count(num_gpus, 'GPU')}, and each has an engine already; NCCL needs a GPU "
            "per rank. Go on without the lost ranks, with on_failure='shrink', or start another cluster"
        )
    return least_used

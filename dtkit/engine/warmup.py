"""Imports and initializations of the first step, done beforehand by an engine that starts or waits as a spare.

Imports create hundreds of thousands of objects that stay, and garbage collection visits them again and again. Without
it, torch and its dynamo load in two thirds of the time.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

from dtkit.engine import memory_limit

if TYPE_CHECKING:
    from collections.abc import Iterator


def load_torch() -> None:
    """Import what forming the process group needs."""
    with _without_collection():
        import torch

        import dtkit.engine.checks
        import dtkit.engine.comm.process_group
        import dtkit.engine.memory  # noqa: F401

        del torch


def preload() -> None:
    """Load what the first step needs; torch's dynamo alone, for the first optimizer, takes about a second."""
    with _without_collection():
        import torch
        from torch.nn.parallel import DistributedDataParallel  # noqa: F401

        import dtkit.engine.build
        import dtkit.engine.data.loader
        import dtkit.engine.job
        import dtkit.strategies.data_parallel  # noqa: F401

        p = torch.nn.Parameter(torch.zeros(1))
        p.grad = torch.zeros(1)
        torch.optim.SGD([p], lr=0.1).step()
        del p
    _freeze_loaded_objects()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause garbage collection, except under a memory limit: garbage leaves free memory, which no limit counts."""
    was_enabled = gc.isenabled()
    if memory_limit.read_configured_limit() is None:
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _freeze_loaded_objects() -> None:
    """Exclude modules from garbage collection, which takes long for them.

    No-op if there are tensors: excluded objects are never collected, and a model may be among them.
    """
    import torch

    gc.collect()
    kinds = set(map(type, gc.get_objects()))
    if not any(issubclass(kind, torch.Tensor) for kind in kinds):
        gc.freeze()

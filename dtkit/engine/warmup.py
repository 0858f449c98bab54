"""Imports and initializations of the first step, done beforehand by an engine that starts or waits as a spare."""

from __future__ import annotations

import gc


def preload() -> None:
    """Load what the first step needs; torch's dynamo alone, for the first optimizer, takes over a second."""
    import torch
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    import dtkit.engine.job
    import dtkit.strategies.data_parallel  # noqa: F401

    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.zeros(1)
    torch.optim.SGD([p], lr=0.1).step()
    del p
    _freeze_loaded_objects()


def _freeze_loaded_objects() -> None:
    """Exclude modules from garbage collection, which takes long for them.

    No-op if there are tensors: excluded objects are never collected, and a model may be among them.
    """
    import torch

    gc.collect()
    if not any(issubclass(type(item), torch.Tensor) for item in gc.get_objects()):
        gc.freeze()

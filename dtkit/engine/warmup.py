"""What the first step would load, loaded before: on an engine that starts, or that waits as a spare."""

from __future__ import annotations

import gc


def preload() -> None:
    """Load what the first step would load: the first optimiser takes over a second, for torch's dynamo."""
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
    """Have garbage collections pass over modules: the one between two jobs took 0.15 s for them, and more under load.

    Only where there is no tensor yet: what is set aside is never collected, and nobody's model may be among it.
    """
    import torch

    gc.collect()
    if not any(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()):
        gc.freeze()

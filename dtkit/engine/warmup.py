"""Imports and initializations for the first step, which an engine does while it starts or waits as a spare.

Imports create hundreds of thousands of objects that stay, which garbage collection visits repeatedly. Without
collection, torch loads in two thirds of the time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading

from dtkit._util.garbage import pause_gc
from dtkit._util.lazy_compiler import COMPILER, defer_compiler
from dtkit.engine import memory_limit


def load_torch() -> None:
    """Import the modules for forming the process group."""
    with without_collection():
        import torch

        import dtkit.engine.checks
        import dtkit.engine.comm.process_group
        import dtkit.engine.memory  # noqa: F401

        del torch


def preload() -> None:
    """Load the modules for the first step, and exclude them from garbage collection."""
    load_modules()
    _freeze_loaded_objects()


def load_modules() -> None:
    """Load the modules for the first step, without torch's compiler unless it would count towards a memory limit."""
    with without_collection():
        import torch
        from torch.nn.parallel import DistributedDataParallel  # noqa: F401

        import dtkit.engine.build
        import dtkit.engine.data.loader
        import dtkit.engine.job
        import dtkit.strategies.data_parallel  # noqa: F401

        if memory_limit.read_configured_limit() is not None:
            importlib.import_module(COMPILER)
        defer_compiler()
        p = torch.nn.Parameter(torch.zeros(1))
        p.grad = torch.zeros(1)
        torch.optim.SGD([p], lr=0.1).step()
        del p


def without_collection() -> contextlib.AbstractContextManager[None]:
    """Pause garbage collection, except under a memory limit: uncollected garbage counts towards it."""
    return pause_gc() if memory_limit.read_configured_limit() is None else contextlib.nullcontext()


def _freeze_loaded_objects() -> None:
    """Exclude modules from garbage collection, which takes long for them.

    No-op if there are tensors: excluded objects are never collected, and a model may be among them. No-op besides other
    work in this process, as in the test double: a tuple that another thread builds must not be seen (SystemError).
    """
    import torch

    if threading.current_thread() is not threading.main_thread():
        return
    gc.collect()
    kinds = set(map(type, gc.get_objects()))
    if not any(issubclass(kind, torch.Tensor) for kind in kinds):
        gc.freeze()

"""Check that a forward pass writes to no frozen parameter that FSDP has gathered for it: the writes would be lost.

A momentum teacher is such a parameter. FSDP frees the gathered copy afterwards, and keeps its shards.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dtkit.engine.state.checksum import compute_checksum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn


@contextlib.contextmanager
def refuse_frozen_writes(model: nn.Module) -> Iterator[None]:
    """Within the context, raise ValueError after a module's forward that has written to gathered frozen parameters."""
    before: dict[nn.Module, tuple[Sequence[torch.Tensor], int]] = {}

    def remember(module: nn.Module, _inputs: Any) -> None:
        gathered = [p for p in module.parameters() if not p.requires_grad and not isinstance(p, DTensor)]
        before[module] = gathered, compute_checksum(gathered)

    def compare(module: nn.Module, _inputs: Any, _output: Any) -> None:
        gathered, checksum = before.pop(module, ([], 0))
        if compute_checksum(gathered) != checksum:
            name = type(module).__name__.removeprefix("FSDP")
            raise ValueError(
                f"the forward of {name} writes to frozen parameters, as for a momentum teacher, and Sharded would "
                "lose that. Use strategy=dtkit.DataParallel()"
            )

    modules = [
        m for m in model.modules() if isinstance(m, FSDPModule) and not all(p.requires_grad for p in m.parameters())
    ]
    # FSDP gathers in a hook before, and frees in a hook after these.
    handles = [m.register_forward_pre_hook(remember) for m in modules]
    handles += [m.register_forward_hook(compare, prepend=True) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

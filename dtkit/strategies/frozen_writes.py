"""Check that a forward pass writes to no frozen parameter that FSDP has gathered for it: the writes would be lost.

A momentum teacher is such a parameter. FSDP frees the gathered copy afterwards, and keeps its shards. Torch counts most
writes, and a replaced tensor has another address. Writes to ``.data`` show only in the values, which a thorough check
compares.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from dtkit._util.dtensor import is_dtensor
from dtkit._util.torch_private import count_inplace_writes, get_parameter_dict
from dtkit.engine.state.checksum import compute_checksum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_Gathered = dict[tuple["nn.Module", str], torch.Tensor]
_THOROUGH_EVERY = 16  # steps


def is_thorough_step(num_steps: int) -> bool:
    """Return whether the values are compared in a step: in the first two, and sometimes later."""
    return num_steps < 2 or num_steps % _THOROUGH_EVERY == 0


@contextlib.contextmanager
def refuse_frozen_writes(model: nn.Module, *, thorough: bool) -> Iterator[None]:
    """Within the context, raise ValueError after a module's forward that has written to gathered frozen parameters."""
    before: dict[nn.Module, tuple[_Gathered, list[int]]] = {}

    def measure(gathered: _Gathered) -> list[int]:
        marks = [mark for p in gathered.values() for mark in (count_inplace_writes(p), p.data_ptr())]
        return [*marks, compute_checksum(list(gathered.values()))] if thorough else marks

    def remember(module: nn.Module, _inputs: Any) -> None:
        gathered = _list_gathered(module)
        before[module] = gathered, measure(gathered)

    def compare(module: nn.Module, _inputs: Any, _output: Any) -> None:
        gathered, marks = before.pop(module, ({}, []))
        now = {(owner, name): get_parameter_dict(owner).get(name) for owner, name in gathered}
        is_replaced = any(now[key] is not p and not is_dtensor(now[key]) for key, p in gathered.items())
        if is_replaced or (marks and measure(gathered) != marks):
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


def _list_gathered(module: nn.Module) -> _Gathered:
    """Return the frozen parameters that are whole now, by owner and name."""
    return {
        (owner, name): p
        for owner in module.modules()
        for name, p in owner.named_parameters(recurse=False)
        if not p.requires_grad and not is_dtensor(p)
    }

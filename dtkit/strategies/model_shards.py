"""Loading and moving of the DTensor shards of a model.

A rank never copies the whole model: it shards a copy without values, and loads its own shards into that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from dtkit._util.dtensor import is_dtensor
from dtkit.engine.state.dtensor_shards import (
    get_num_fused_blocks,
    move_to_mesh_of,
    set_num_fused_blocks,
    slice_like,
    wrap_local_shard,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def load_shards(model: nn.Module, sharded_model: nn.Module, device: torch.device) -> None:
    """Load this rank's shards of `model` into `sharded_model`, a sharded copy without values."""

    def convert(p: nn.Parameter, like: nn.Parameter) -> nn.Parameter:
        if not is_dtensor(like):
            return nn.Parameter(p.detach().to(device, copy=True), p.requires_grad)
        part = slice_like(p.detach(), like).to(device, copy=True, memory_format=torch.contiguous_format)
        return nn.Parameter(wrap_local_shard(part, like), p.requires_grad)

    _replace_parameters(sharded_model, dict(model.named_parameters(remove_duplicate=False)), convert)
    copies: dict[int, torch.Tensor] = {}
    for before, after in zip(model.modules(), sharded_model.modules(), strict=True):
        for name, buffer in before.named_buffers(recurse=False):
            copies.setdefault(id(buffer), buffer.to(device, copy=True))
            setattr(after, name, copies[id(buffer)])


def transfer_shards(
    sharded_parameters: Mapping[str, nn.Parameter], old_model: nn.Module, new_model: nn.Module
) -> dict[nn.Parameter, nn.Parameter]:
    """Move the shards, buffers and plain attributes of `old_model` to `new_model`, which is sharded alike.

    Returns {old parameter: new parameter}.
    """

    def convert(p: nn.Parameter, like: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(move_to_mesh_of(p, like), p.requires_grad) if is_dtensor(like) else p

    new_parameters = _replace_parameters(new_model, sharded_parameters, convert)
    for before, after in zip(old_model.modules(), new_model.modules(), strict=True):
        after.__dict__.update({k: v for k, v in vars(before).items() if isinstance(v, (bool, int, float, str))})
        for name, buffer in before.named_buffers(recurse=False):
            setattr(after, name, buffer)
    return new_parameters


def _replace_parameters(
    model: nn.Module,
    source_parameters: Mapping[str, nn.Parameter],
    convert: Callable[[nn.Parameter, nn.Parameter], nn.Parameter],
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace a model's parameters by converted ones of the same name. Return {source: converted parameter}."""
    converted: dict[nn.Parameter, nn.Parameter] = {}
    for name, like in list(model.named_parameters(remove_duplicate=False)):
        p = source_parameters[name]
        if p not in converted:
            converted[p] = set_num_fused_blocks(convert(p, like), get_num_fused_blocks(like))
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, converted[p])
    return converted


def rebind_optimizer(optimizer: torch.optim.Optimizer, new_parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace an optimizer's parameters, and move its state to the mesh of the new ones."""
    for group in optimizer.param_groups:
        group["params"] = [new_parameters[p] for p in group["params"]]
    for old, new in new_parameters.items():
        if old is new or old not in optimizer.state:
            continue
        state = optimizer.state.pop(old)
        assert is_dtensor(new)
        optimizer.state[new] = {k: move_to_mesh_of(v, new) if is_dtensor(v) else v for k, v in state.items()}

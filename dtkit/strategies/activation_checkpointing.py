"""Activation checkpointing: blocks keep only their inputs, and compute again in backward (Chen et al., 2016).

Memory falls from the activations of all blocks to those of one, for about a third more computation. A Pipeline does so
with whole stages.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from dtkit._util.torch_private import NormBase
from dtkit.strategies.kv_cache import disable_kv_cache
from dtkit.strategies.pipeline.cut import find_layer_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


def checkpoint_blocks(model: nn.Module, blocks: bool | Sequence[str]) -> nn.Module:  # noqa: FBT001 - as the user gave it
    """Return a copy of a model, over the same parameters, whose blocks compute again in backward.

    `blocks` are names of modules; True stands for the model's chain of layers. Raises ValueError without any.
    """
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memo)
    disable_kv_cache(copied)
    for block in find_blocks(copied, blocks):
        block.forward = functools.partial(run_checkpointed, block.forward)
    return copied


def refuse_batch_norm(block: nn.Module) -> None:
    """Raise ValueError for a module whose running statistics would count each batch twice."""
    for name, module in block.named_modules():
        if isinstance(module, NormBase) and module.track_running_stats:
            raise ValueError(
                f"activation_checkpointing computes {name or 'a module'} ({type(module).__name__}) twice, and its "
                "running statistics would count each batch twice. Name blocks without it, or use GroupNorm"
            )


def find_blocks(model: nn.Module, blocks: bool | Sequence[str]) -> list[nn.Module]:  # noqa: FBT001 - as above
    """Return the modules that `blocks` stands for. Raise ValueError without any, or for one with batch statistics."""
    found = _find_blocks(model, blocks)
    for block in found:
        refuse_batch_norm(block)
    return found


def _find_blocks(model: nn.Module, blocks: bool | Sequence[str]) -> list[nn.Module]:  # noqa: FBT001 - as above
    modules = dict(model.named_modules())
    if blocks is True:
        chain = [block for _, block in find_layer_chain(model) if any(True for _ in block.parameters())]
        if not chain:
            raise ValueError(
                f"activation_checkpointing=True: {type(model).__name__} has no chain of blocks (an nn.ModuleList or "
                "nn.Sequential). Name the modules: activation_checkpointing=['encoder', 'decoder']"
            )
        return chain
    names = list(blocks or ())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ValueError(
            f"activation_checkpointing names {', '.join(map(repr, unknown))}, and {type(model).__name__} has no such "
            f"module; it has {', '.join(list(filter(None, modules))[:8])}, ..."
        )
    return [modules[name] for name in names]


def run_checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a forward pass for which backward keeps only the inputs."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

"""Outputs of FSDP2's blocks that are views: an in-place operation on one is refused.

FSDP2 registers a hook with each output, which gathers the block's parameters before its backward pass. An in-place
operation on a view gives it a new place in the graph of autograd, without the hook. FSDP2 only warns of every view.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.torch_private import is_view, tree_map

if TYPE_CHECKING:
    from torch import nn

_IN_PLACE_NOTE = (
    "Sharded gathers each block's parameters by a hook on the block's output, which is lost here. Use y = y + x "
    "instead of y += x, or change a copy: y = y.clone()"
)


class ShardedView(torch.autograd.Function):
    """A view that autograd lets nobody change in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the whole tensor."""
        del ctx
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as it is."""
        del ctx
        return gradients[0]


def refuse_in_place_operations(block: nn.Module) -> None:
    """Let in-place operations on the block's outputs that are views raise. To be called before `fully_shard`."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    block.register_forward_hook(_protect_views)


def _protect_views(block: nn.Module, inputs: Any, output: Any) -> Any:
    del block, inputs
    if not torch.is_grad_enabled():
        return None
    return tree_map(_protect, output)


def _protect(leaf: Any) -> Any:
    needs_protection = isinstance(leaf, torch.Tensor) and leaf.requires_grad and is_view(leaf)
    return ShardedView.apply(leaf) if needs_protection else leaf  # type: ignore[no-untyped-call]


def explain_in_place(error: BaseException) -> str | None:
    """Return the remedy if an in-place operation was refused."""
    return _IN_PLACE_NOTE if f"Output 0 of {ShardedView.__name__} is a view" in str(error) else None

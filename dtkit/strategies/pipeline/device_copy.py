"""Copies of modules on another device, made of the modules alone: a whole model is never moved to cut it there."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def copy_to_device(module: nn.Module, device: torch.device, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a module whose parameters and buffers lie on a device, each moved by itself and once.

    `memo` is what was copied already, by id, as of :func:`copy.deepcopy`: what two modules share stays shared.
    """
    memo = {} if memo is None else memo
    memo |= copy_tensors_to_device([t for t in (*module.parameters(), *module.buffers()) if id(t) not in memo], device)
    return copy.deepcopy(module, memo)


def copy_tensors_to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """Copies of parameters and buffers on a device, by the id of what they are copies of."""
    return {id(t): _copy_tensor(t, device) for t in tensors}


def _copy_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    found = tensor.detach().to(device, copy=True)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found

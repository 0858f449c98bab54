"""Copies of modules on another device, so that the whole model is never moved there."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def copy_to_device(module: nn.Module, device: torch.device, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a module on a device, with each parameter and buffer copied once.

    `memo` maps ids to existing copies, as in :func:`copy.deepcopy`, so that shared tensors stay shared.
    """
    memo = {} if memo is None else memo
    memo |= copy_tensors_to_device([t for t in (*module.parameters(), *module.buffers()) if id(t) not in memo], device)
    return copy.deepcopy(module, memo)


def copy_tensors_to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """Return copies of parameters and buffers on a device, by the ids of the originals."""
    return {id(t): _copy_tensor(t, device) for t in tensors}


def _copy_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copied = tensor.detach().to(device, copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied

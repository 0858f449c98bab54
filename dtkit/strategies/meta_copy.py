"""Copies of models without values, and the size of tensors in bytes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


META_DEVICE = torch.device("meta")


def copy_to_meta(model: nn.Module, device: torch.device = META_DEVICE) -> nn.Module:
    """Return a copy of the model whose parameters and buffers have no values; shared tensors stay shared."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): make_empty_like(t, device) for t in tensors if t.layout is torch.strided})


def make_empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an empty tensor or parameter of the same shape, strides and type."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def count_bytes(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> int:
    """Return the bytes of the elements, where each tensor counts once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())

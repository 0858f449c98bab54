"""Copies of models without numbers, and how many bytes tensors take."""

from __future__ import annotations

import contextlib

import copy

import dataclasses

import weakref

from typing import TYPE_CHECKING, Any

import torch

from torch import nn

from torch.utils._python_dispatch import TorchDispatchMode

from torch.utils._pytree import tree_leaves, tree_map

from dtkit.strategies.base import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from dtkit.strategies.loss import Loss


META_DEVICE = torch.device("meta")


def copy_to_meta(model: nn.Module, device: torch.device = META_DEVICE) -> nn.Module:
    """A copy of the model in which parameters and buffers are shapes; ties between them stay."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): make_empty_like(t, device) for t in tensors if t.layout is torch.strided})


def make_empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor or parameter of the same shape, strides and type."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def count_bytes(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> int:
    """Bytes of the elements, each tensor once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


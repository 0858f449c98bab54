"""Conversion of gradients and outputs to and from DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dtkit.engine.state.dtensor_shards import get_local_tensor, wrap_local_shard


def gather_full(value: Any) -> Any:
    """Return DTensors as whole tensors, also in tuples, lists and dicts. A collective of the ranks with shards."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        return get_local_tensor(value)
    if isinstance(value, dict):
        return {key: gather_full(entry) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(gather_full, value))
    return value


def redistribute_gradient(p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with its parameter's placements."""
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        placements = p.placements if isinstance(p, DTensor) else (Replicate(),) * mesh.ndim
        gradient = gradient if gradient.placements == placements else gradient.redistribute(mesh, placements)
    local = get_local_tensor(gradient)
    if isinstance(gradient, DTensor) and isinstance(p, DTensor) and not local.is_sparse:
        return gradient  # without another DTensor, which would cost as much as a small operation
    return wrap_gradient(p, local.to_dense() if local.is_sparse else local)


def wrap_gradient(p: torch.Tensor, local_gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, given this rank's part."""
    return wrap_local_shard(local_gradient, p) if isinstance(p, DTensor) else local_gradient

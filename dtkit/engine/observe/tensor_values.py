"""Values of tensors as the probes report them: digests, norms and sizes of this rank's part."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.torch_private import get_sparse_indices, get_sparse_values, get_storage_id

if TYPE_CHECKING:
    from collections.abc import Iterable


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be a DTensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, since the all-reduce or the optimizer may overwrite the tensor."""
    return to_local(tensor).detach().to("cpu", copy=True)


def flatten_to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as one dimension on the CPU in float64; complex ones as two values each."""
    dense = to_local(tensor).detach().cpu()
    dense = dense.to_dense() if dense.is_sparse else dense
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.reshape(-1).double()


def compute_norm(flat_tensor: torch.Tensor) -> float:
    """Return the norm of a tensor of one dimension."""
    return float(torch.linalg.vector_norm(flat_tensor))


def compute_cosine(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the cosine between two gradients, or None if one is zero or nonfinite."""
    size = compute_norm(a) * compute_norm(b)
    if not size or not math.isfinite(size):
        return None
    return max(-1.0, min(1.0, float(a @ b) / size))


def compute_digest(named_tensors: Iterable[tuple[str, Any]]) -> str:
    """Return twelve hexadecimal digits that are equal for equal names and bits."""
    digest = hashlib.blake2b(digest_size=6)
    for name, value in named_tensors:
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(to_local(value).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def count_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages on this rank. A shared storage counts once."""
    sizes = {}
    for tensor in tensors:
        local = to_local(tensor)
        for part in (get_sparse_indices(local), get_sparse_values(local)) if local.is_sparse else (local,):
            storage = part.untyped_storage()
            sizes[get_storage_id(storage)] = storage.nbytes()
    return sum(sizes.values())

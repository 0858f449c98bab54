"""Gradients in one buffer, which ranks sum by one all-reduce after backward.

DDP overlaps the all-reduce of a bucket with the computation of the next ones. Small gradients fit into its first
bucket, so nothing overlaps, but DDP's own work in each step remains. One flat buffer costs less, and its norm is one
operation. Ranks of one host sum larger buffers, too, by memory that they share: there, nothing is worth overlapping.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dtkit._util.torch_private import foreach_copy_

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FLAT_BYTES = 2**20  # DDP's first bucket: larger gradients have several, which overlap with backward
MAX_FLAT_BYTES_OF_ONE_HOST = 2**27  # beyond, a second copy of all gradients costs more memory than it saves time
MAX_FLAT_BYTES_AT_ONCE = 2**28  # of a model whose backward returns all gradients at its end: nothing overlaps


def choose_max_flat_bytes(*, is_one_host: bool) -> int:
    """Return the most bytes of gradients in one buffer, for ranks of one host or of several."""
    return MAX_FLAT_BYTES_OF_ONE_HOST if is_one_host else MAX_FLAT_BYTES


def fits_flat_buffer(model: torch.nn.Module, max_bytes: int) -> bool:
    """Return whether a model's gradients are dense, of one type, and at most `max_bytes`.

    Gradients that backward returns at once may have up to `MAX_FLAT_BYTES_AT_ONCE`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if any(getattr(module, "sparse", False) is True for module in model.modules()):  # embeddings
        return False
    limit = MAX_FLAT_BYTES_AT_ONCE if getattr(model, "has_gradients_at_once", False) else max_bytes
    has_one_type = len({(p.dtype, p.device) for p in parameters}) == 1
    return has_one_type and not any(p.is_complex() for p in parameters) and sum(p.nbytes for p in parameters) <= limit


class FlatGradients:
    """The gradients of some parameters as views of one buffer."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.buffer = torch.zeros(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self._has_exact_dot = self.buffer.is_cpu and self.buffer.dtype in (torch.float32, torch.float64)
        parts = torch.split(self.buffer, [p.numel() for p in parameters])
        self._views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def copy(self) -> bool:
        """Copy all gradients into the buffer, and return True. Return False if one is missing or sparse."""
        gradients = [p.grad for p in self._parameters]
        for gradient in gradients:
            if gradient is None or gradient.is_sparse:
                return False
        foreach_copy_(self._views, gradients)
        return True

    def collect(self) -> torch.Tensor:
        """Copy all gradients into the buffer, let parameters have its views, and return the buffer."""
        foreach_copy_(self._views, [p.grad for p in self._parameters])
        for p, view in zip(self._parameters, self._views, strict=True):
            p.grad = view
        return self.buffer

    def compute_norm(self) -> float:
        """Return the norm of the buffer. A dot product takes half as long as torch's norm."""
        if self._has_exact_dot:
            return math.sqrt(torch.dot(self.buffer, self.buffer).item())
        return float(torch.linalg.vector_norm(self.buffer))

    @property
    def is_current(self) -> bool:
        """Whether the parameters' gradients are in the buffer, so that its norm is theirs."""
        return self._parameters[0].grad is self._views[0]

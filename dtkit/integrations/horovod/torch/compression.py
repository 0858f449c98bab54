"""Compression of torch's tensors on their way to other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.integrations.horovod.compression import Compressor, NoneCompressor

if TYPE_CHECKING:
    import torch


class FP16Compressor(Compressor):
    """Sends floating-point tensors in half precision, and others as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor in half precision, and its dtype."""
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return the tensor in its former dtype."""
        return tensor.to(ctx)


class Compression:
    """The compressors that functions accept as `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor

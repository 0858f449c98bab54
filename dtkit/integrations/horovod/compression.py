"""The compressors of tensors that Horovod's interfaces share."""

from __future__ import annotations

from typing import Any


class Compressor:
    """Base class of custom compressors; by itself, the identity."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former type."""
        del ctx
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

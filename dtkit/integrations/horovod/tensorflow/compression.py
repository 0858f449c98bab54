"""Compression of TensorFlow's tensors on their way to other ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dtkit.integrations.horovod.compression import Compressor, NoneCompressor


class FP16Compressor(Compressor):
    """Sends floating-point tensors in half precision, and others as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in half precision, and its dtype."""
        return tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former dtype."""
        return tf.cast(tensor, ctx)


class Compression:
    """The compressors that functions accept as `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor

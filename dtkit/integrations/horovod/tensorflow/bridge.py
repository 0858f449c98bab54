"""TensorFlow's tensors as torch's: the operations themselves are those of :mod:`dtkit.integrations.horovod.torch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.integrations.horovod.process_sets import ProcessSet


def call(function: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Call a function of torch tensors with TensorFlow's, and return its results as TensorFlow's.

    dtypes : types of the results.

    A graph (`tf.function`, `fit`) calls the function by `tf.py_function`, in the order in which it was traced. XLA
    can't compile that: use ``compile(jit_compile=False)``.
    """

    def run(*values: Any) -> list[Any]:
        return [to_tensorflow(result) for result in function(*map(to_torch, values))]

    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return run(*tensors) if tf.executing_eagerly() else list(tf.py_function(run, tensors, list(dtypes)))


def read_size(process_set: ProcessSet, dtype: Any) -> Any:
    """Return the number of ranks as a tensor. A graph reads it whenever it runs: elastic scripts may lose ranks."""

    def read() -> int:
        return process_set.size() or 1

    size = read() if tf.executing_eagerly() else tf.ensure_shape(tf.py_function(read, [], tf.int64), [])
    return tf.cast(size, dtype)


def to_torch(tensor: Any) -> torch.Tensor:
    """Return a copy as a CPU tensor. Raises TypeError for types that don't travel, such as strings."""
    array = np.array(tensor)
    if array.dtype == tf.bfloat16.as_numpy_dtype:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"a tensor of dtype {array.dtype} can't be sent to other ranks; use broadcast_object instead")
    return torch.from_numpy(array)


def to_tensorflow(tensor: torch.Tensor) -> Any:
    """Return a copy as TensorFlow's tensor."""
    if tensor.dtype == torch.bfloat16:
        return tf.bitcast(tf.constant(tensor.view(torch.int16).numpy()), tf.bfloat16)
    return tf.convert_to_tensor(tensor.numpy())

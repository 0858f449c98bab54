"""Conversion of TensorFlow's tensors to torch's and back, for :mod:`dtkit.integrations.horovod.torch`."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import torch

from dtkit.integrations.horovod.context import is_strict
from dtkit.integrations.horovod.exceptions import MismatchError, NotInitializedError
from dtkit.integrations.xla import refuse_xla

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.integrations.horovod.process_sets import ProcessSet

_SESSION_THREADS = 256
"""An operation of a session occupies a thread until all ranks run it, so these are the operations in flight."""
if is_strict():
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", str(_SESSION_THREADS))  # TensorFlow reads it at the first session


def call(function: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Call a function of torch tensors with TensorFlow's, and return its results as TensorFlow's.

    dtypes : types of the results.

    A graph (`tf.function`, `fit`) calls the function by `tf.py_function`, in the order in which it was traced. XLA
    can't compile that: use ``compile(jit_compile=False)``. A session of TensorFlow 1 calls independent functions in any
    order, which may differ between ranks. So it needs ``HOROVOD_CHECK=1``, which matches operations by name.
    """

    def run(*values: Any) -> list[Any]:
        return [to_tensorflow(result) for result in function(*map(to_torch, values))]

    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tf.executing_eagerly():
        _check_order_of_graph()
        refuse_xla()
        return list(tf.py_function(run, tensors, list(dtypes)))
    with _raising_as_horovod():
        return run(*tensors)


def is_session_graph() -> bool:
    """Return whether operations are now added to a graph that a session of TensorFlow 1 runs."""
    return not (tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function)


def _check_order_of_graph() -> None:
    """Refuse a graph whose operations have no order. Functions have one."""
    if is_session_graph() and not is_strict():
        raise NotImplementedError(
            "a session of TensorFlow 1 runs operations in any order, so ranks could wait for each other. Use "
            "tf.function or eager mode, or set HOROVOD_CHECK=1 before the script starts"
        )


@contextlib.contextmanager
def _raising_as_horovod() -> Iterator[None]:
    """Raise the errors that Horovod's operations have in eager mode. A graph has but UnknownError for most."""
    try:
        yield
    except MismatchError as error:
        raise tf.errors.FailedPreconditionError(None, None, str(error)) from error
    except NotInitializedError:
        raise
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error


def make_name(kind: str, name: str | None) -> str | None:
    """Return a name for an unnamed operation of a graph, since a graph may run its operations in any order."""
    if name is not None or tf.executing_eagerly():
        return name
    return str(tf.compat.v1.get_default_graph().unique_name(f"graph_{kind}"))


def read_size(process_set: ProcessSet, dtype: Any) -> Any:
    """Return the number of ranks as a tensor."""
    return tf.cast(read_number(lambda: process_set.size() or 1), dtype)


def read_number(read: Callable[[], int]) -> Any:
    """Return an integer as a tensor. A graph reads it whenever it runs: elastic scripts may lose ranks."""
    if tf.executing_eagerly():
        return tf.constant(read(), tf.int64)
    return tf.ensure_shape(tf.py_function(read, [], tf.int64), [])


def to_torch(tensor: Any) -> torch.Tensor:
    """Return a copy as a CPU tensor. Raises TypeError for types that can't be sent, such as strings."""
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

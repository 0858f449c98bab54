"""Averages and broadcasts of TensorFlow's values over the ranks.

Values leave TensorFlow as numpy arrays. Graphs (`tf.function`, `fit`) do this by `tf.py_function`, which XLA can't
compile: use ``compile(jit_compile=False)``. All ranks must call the same functions in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from dtkit.integrations.keras.weight_decay import copy_exclusions
from dtkit.integrations.xla import refuse_xla

if TYPE_CHECKING:
    from collections.abc import Sequence


class DistributedGradientTape(tf.GradientTape):  # type: ignore[misc]  # tensorflow has no types
    """A gradient tape whose gradients are means over the ranks."""

    def gradient(self, target: Any, sources: Any, *args: Any, samples: Any = None, **options: Any) -> Any:
        """Return the gradients, averaged over ranks, weighted by `samples` if given. A collective.

        With unequal batches, `samples` is the number of rows in this rank's batch, and `target` is their mean.
        """
        gradients = super().gradient(target, sources, *args, **options)
        flat = tf.nest.flatten(gradients)
        return tf.nest.pack_sequence_as(gradients, average_gradients(flat, samples))


def DistributedOptimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:  # noqa: N802 - as Horovod calls it
    """Return an optimizer of the same kind and options that averages gradients over the ranks before each update."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer is {optimizer!r}; give an object of keras.optimizers, as keras.optimizers.SGD(0.1)")
    kind: Any = type(optimizer)

    class Distributed(kind):  # type: ignore[misc]  # its base is the given optimizer's class
        """Optimizer that averages gradients over the ranks."""

        def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            """Average, and update. A collective."""
            return super().apply(average_gradients(grads), trainable_variables)

    Distributed.__name__ = Distributed.__qualname__ = kind.__name__
    made: keras.optimizers.Optimizer = Distributed.from_config(optimizer.get_config())
    copy_exclusions(optimizer, made)
    return made


def average_gradients(gradients: Sequence[Any], samples: Any = None) -> list[Any]:
    """Return means over the ranks, weighted by `samples` if given. A collective. A gradient of None stays None."""
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    if not dense:
        return list(gradients)
    weight = tf.cast(1.0 if samples is None else samples, tf.float64)
    if tf.executing_eagerly():
        means = [tf.convert_to_tensor(mean) for mean in _average(weight, *dense)]
    else:
        refuse_xla()
        means = tf.py_function(_average, [weight, *dense], [gradient.dtype for gradient in dense])
        for mean, gradient in zip(means, dense, strict=True):
            mean.set_shape(gradient.shape)
    remaining = iter(means)
    return [None if gradient is None else next(remaining) for gradient in gradients]


def _average(weight: Any, *gradients: Any) -> list[np.ndarray]:
    """Return weighted means of arrays, by one all-reduce for each dtype."""
    arrays = [gradient.numpy() for gradient in gradients]
    if float(weight) == 0:
        arrays = [np.zeros_like(array) for array in arrays]  # means of no rows are not numbers
    total = torch.tensor([float(weight)], dtype=torch.float64)
    dist.all_reduce(total)
    if not (float(weight) >= 0 and total.item() > 0):
        raise ValueError(
            f"samples={float(weight):g} here, and {total.item():g} over all ranks; give each rank's number of rows, at "
            "least 0, and not 0 on all ranks"
        )
    share = float(weight) / total.item()
    means: list[np.ndarray] = [np.empty(0)] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        chosen = [k for k, array in enumerate(arrays) if array.dtype == dtype]
        flat = torch.from_numpy(np.concatenate([arrays[k].ravel() * dtype.type(share) for k in chosen]))
        dist.all_reduce(flat)
        parts = np.split(flat.numpy(), np.cumsum([arrays[k].size for k in chosen])[:-1])
        for k, part in zip(chosen, parts, strict=True):
            means[k] = part.reshape(arrays[k].shape)
    return means


def _check_variables(values: Any) -> list[Any]:
    """Return a list of variables. Raises TypeError for anything else, on each rank alike."""
    listed: list[Any] = list(values) if isinstance(values, (list, tuple)) else [None]
    if not all(hasattr(value, "assign") for value in listed):
        raise TypeError("variables must be a list of TensorFlow's or Keras's variables, as in [variable]")
    return listed


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Copy the values of `root_rank` to all ranks. A collective, for use outside of graphs."""
    if not 0 <= root_rank < dist.get_world_size():
        raise ValueError(f"root_rank={root_rank}; the ranks are 0 to {dist.get_world_size() - 1}")
    for variable in _check_variables(variables):
        value = torch.from_numpy(np.array(keras.ops.convert_to_numpy(variable)))
        dist.broadcast(value, root_rank)
        variable.assign(value.numpy())

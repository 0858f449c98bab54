"""Batch normalization of Keras with the statistics of all ranks' samples."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from dtkit.integrations.horovod.reductions import Sum
from dtkit.integrations.horovod.tensorflow.operations import allreduce


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # keras has no types
    """Batch normalization over the batches of all ranks, which may be unequal, but not all empty.

    Parameters are those of :class:`keras.layers.BatchNormalization`.
    """

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        axis = self.axis % len(inputs.shape)
        others = [k for k in range(len(inputs.shape)) if k != axis]
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        # Two sums are used, since a sum of squares alone loses digits where the mean is large.
        sums = allreduce(tf.stack([tf.reduce_sum(values, others) for values in (inputs * weights, weights)]), op=Sum)
        mean, total = sums[0] / sums[1], sums[1]
        shape = [-1 if k == axis else 1 for k in range(len(inputs.shape))]
        squares = tf.square(inputs - tf.reshape(mean, shape)) * weights
        return mean, allreduce(tf.reduce_sum(squares, others), op=Sum) / total

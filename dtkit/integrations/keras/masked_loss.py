"""Losses whose mean leaves out masked or ignored targets. Ranks may have unequal numbers of the others."""

from __future__ import annotations

import functools
from typing import Any

import keras

from dtkit._util.torch_private import keras_masking


class TargetCounter:
    """Counts the targets in a loss's mean. It watches the values that Keras takes the mean of."""

    def __init__(self) -> None:
        self._mask: Any = None
        self._is_by_target = False
        """Whether the last values were not a single number, which Keras leaves as it is."""

    def watch(self, loss: Any) -> Any:
        """Return a loss whose values this counter sees. `loss` is a name, an object or a function of Keras."""
        known = keras.losses.get(loss)
        if isinstance(known, keras.losses.Loss):
            return _WatchedLoss(known, self)

        @functools.wraps(known)
        def call(*args: Any) -> Any:
            return self.see(known(*args))

        return call

    def see(self, values: Any) -> Any:
        """Return the values of a batch."""
        self._is_by_target = keras.ops.ndim(values) > 0
        self._mask = keras_masking.get_keras_mask(values)  # such as for `ignore_class=`
        return values

    def count(self, output: Any) -> Any:
        """Return the number of targets in the last mean; None if there is no mask. `output` is the model's output."""
        masks = [mask for mask in (keras_masking.get_keras_mask(output), self._mask) if mask is not None]
        if not self._is_by_target or not masks:
            return None
        mask = masks[0] if len(masks) == 1 else keras.ops.logical_and(*masks)
        return keras.ops.sum(keras.ops.cast(mask, "int32"))


class _WatchedLoss(keras.losses.Loss):  # type: ignore[misc]  # keras has no types
    """A loss whose values a counter sees."""

    def __init__(self, loss: keras.losses.Loss, counter: TargetCounter) -> None:
        super().__init__(loss.name, loss.reduction, loss.dtype)
        self._loss, self._counter = loss, counter

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the values of a batch."""
        return self._counter.see(self._loss.call(y_true, y_pred))

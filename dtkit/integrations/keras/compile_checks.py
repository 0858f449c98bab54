"""Check of losses, metrics and optimizers in the notebook, which raises errors at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch

from dtkit.integrations.keras.compile_options import is_custom

if TYPE_CHECKING:
    from dtkit.integrations.keras.compile_options import CompileOptions

_MEAN = "sum_over_batch_size"  # as Keras calls it
_CHOSEN_BY_LABELS = ("accuracy", "acc", "crossentropy", "ce")
"""Names of metrics that Keras resolves only when it sees the labels."""
_OWN_STEPS = ("train_step", "test_step", "compute_metrics", "make_train_function", "make_test_function")
"""Methods of a model that `fit` and `evaluate` call, and dtkit doesn't."""


def check_training_step(model: keras.Model) -> None:
    """Raise TypeError for a model with its own training step, which dtkit wouldn't call."""
    own = [name for name in _OWN_STEPS if is_overridden(model, name)]
    if own:
        raise TypeError(
            f"{type(model).__name__} has its own {own[0]}, which cluster.train doesn't call: it computes the loss and "
            "updates by itself. Give the loss as loss=, or override compute_loss; for other loops, use cluster.run "
            "with dtkit.integrations.tensorflow"
        )


def is_overridden(value: Any, name: str) -> bool:
    """Return whether the class that defines a method of a Keras object is not Keras's own."""
    definer = next((kind for kind in type(value).__mro__ if name in vars(kind)), keras.Model)
    return is_custom(definer)


def check_compile_options(options: CompileOptions) -> None:
    """Raise TypeError or ValueError for losses and metrics that Keras doesn't know."""
    for loss in flatten(options.loss):
        _check("loss", loss, keras.losses.get)
        if (reduction := getattr(loss, "reduction", _MEAN)) in (None, "none", "sum"):
            raise ValueError(
                f"loss has the reduction {reduction!r}; ranks have parts of a batch, so it must be a mean: leave "
                "reduction out"
            )
    for metric in flatten(options.metrics):
        if metric not in _CHOSEN_BY_LABELS:
            _check("metrics", metric, keras.metrics.get)


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise TypeError or ValueError for an optimizer that Keras's `fit` treats specially, where dtkit doesn't."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            f"optimizer is a {kind}, which fit gives scaled losses, and dtkit doesn't; its updates would be too small. "
            "Give its inner_optimizer. Keras adds one for the policy 'mixed_float16'; use 'float32'"
        )
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            f"optimizer has loss_scale_factor={optimizer.loss_scale_factor:g}; dtkit doesn't scale losses, so its "
            "updates would be too small: leave loss_scale_factor out"
        )
    if optimizer.use_ema:
        raise ValueError(
            "optimizer has use_ema=True; fit copies the averages into the model at its end, and dtkit doesn't: leave "
            f"use_ema out of {kind}"
        )


def flatten(value: Any) -> list[Any]:
    """Return the parts of lists and dicts of any depth, without None."""
    if isinstance(value, Mapping):
        return flatten(list(value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [part for element in value for part in flatten(element)]
    return [] if value is None else [value]


def _check(name: str, value: Any, get: Callable[[Any], Any]) -> None:
    remedy = "give a name such as 'mse', an object or a function of Keras"
    is_torch = isinstance(value, torch.nn.Module) and not isinstance(value, keras.Layer)
    if is_torch or not (isinstance(value, str) or callable(value)):
        raise TypeError(f"{name} has {value!r}, which is not one of Keras; {remedy}")
    if isinstance(value, str):
        try:
            get(value)
        except ValueError as error:
            raise ValueError(f"{name} has {value!r}, which Keras doesn't know; {remedy}") from error

"""Keras metrics over the rows of all ranks. Their variables are sums, so ranks can be added up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import keras
import numpy as np

from dtkit._util.torch_private import keras_masking

if TYPE_CHECKING:
    import torch

    from dtkit.integrations.keras.compile_options import CompileOptions


class KerasMetrics:
    """All metrics that a model is compiled with, with the methods of a torchmetrics Metric."""

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        self._model: keras.Model | None = None
        self._sums: list[np.ndarray] | None = None
        self._example: tuple[np.ndarray, np.ndarray] | None = None  # builds the metrics on a rank without batches

    def _get_model(self) -> keras.Model:
        if self._model is None:
            self._model = keras.Model()
            options = self._options.copy()  # metrics of a list keep the state of the model that they were compiled with
            self._model.compile(loss=options.loss, metrics=options.metrics, optimizer=None)
        return self._model

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch."""
        values = [np.asarray(tensor.detach().cpu()) for tensor in (target, output)]
        self._example = self._example or (values[0][:1], values[1][:1])
        y, y_pred = (keras.ops.convert_to_tensor(value) for value in values)
        if (mask := keras_masking.get_keras_mask(output)) is not None:
            keras_masking.set_keras_mask(y_pred, keras.ops.convert_to_tensor(np.asarray(mask)))
        self._get_model().compute_metrics(None, y, y_pred, None)
        self._sums = [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._list_variables()]

    def _list_variables(self) -> list[Any]:
        return [variable for metric in self._get_model().metrics for variable in metric.variables]

    def compute(self) -> dict[str, float]:
        """Return the values by name."""
        is_new = self._model is None
        model = self._get_model()
        if self._sums is not None:
            if is_new and self._example is not None:
                y, y_pred = (keras.ops.convert_to_tensor(value) for value in self._example)
                model.compute_metrics(None, y, y_pred, None)
            for variable, total in zip(self._list_variables(), self._sums, strict=True):
                variable.assign(total)
        values = model.get_metrics_result()
        return {name: float(keras.ops.convert_to_numpy(value)) for name, value in values.items() if name != "loss"}

    def reset(self) -> None:
        """Forget all batches."""
        self._model, self._sums = None, None

    def merge_state(self, other: Self) -> None:
        """Add the batches of another rank."""
        if other._sums is not None:
            totals = [np.zeros_like(total) for total in other._sums] if self._sums is None else self._sums
            self._sums = [a + b for a, b in zip(totals, other._sums, strict=True)]
            self._example = self._example or other._example

    def clone(self) -> KerasMetrics:
        """Return new metrics of the same kind."""
        return KerasMetrics(self._options)

    def to(self, _device: Any) -> Self:
        """Return these metrics, which stay on the CPU."""
        return self

    def cpu(self) -> Self:
        """Return these metrics, which are on the CPU."""
        return self

    def __call__(self, *_arguments: Any) -> None:
        """Raise TypeError: the metrics need the state of all batches."""
        raise TypeError("metrics of Keras keep state; they are updated by batch")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

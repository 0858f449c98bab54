"""Keras metrics over the rows of all ranks. Their variables are sums, so ranks can be added up.

A variable that is not a sum, such as a maximum, is found by its first batch: the same batch once more must change it by
as much again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import keras
import numpy as np

from dtkit._util.torch_private import keras_masking
from dtkit.integrations.keras.compile_checks import flatten

if TYPE_CHECKING:
    import torch

    from dtkit.integrations.keras.compile_options import CompileOptions

_MAX_ROUNDING = 1e-3
"""Largest relative rounding of a sum over a batch. Other variables differ by more."""


class KerasMetrics:
    """All metrics that a model is compiled with, with the methods of a torchmetrics Metric."""

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        self._example: tuple[np.ndarray, np.ndarray] | None = None  # builds the metrics on a rank without batches
        self._model: keras.Model | None = None
        self._initial: list[np.ndarray] | None = None  # before the first batch
        self._sums: list[np.ndarray] | None = None
        self._unchecked: set[int] = set()  # variables that no batch has changed yet
        self._not_sums: list[str] = []  # names of variables

    def _get_model(self) -> keras.Model:
        if self._model is None:
            self._model = keras.Model()
            options = self._options.copy()  # metrics of a list keep the state of the model that they were compiled with
            self._model.compile(loss=options.loss, metrics=options.metrics, optimizer=None)
        return self._model

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch."""
        values = [_to_numpy(tensor) for tensor in (target, output)]
        self._example = self._example or (values[0][:1], values[1][:1])
        y, y_pred = (keras.ops.convert_to_tensor(value) for value in values)
        if (mask := keras_masking.get_keras_mask(output)) is not None:
            keras_masking.set_keras_mask(y_pred, keras.ops.convert_to_tensor(np.asarray(mask)))
        model = self._get_model()
        if self._initial is None:
            model.compute_metrics(None, y, y_pred, None)  # creates all variables
            model.reset_metrics()
            self._sums = self._initial = self._read_variables()
            self._unchecked = set(range(len(self._initial)))
        model.compute_metrics(None, y, y_pred, None)
        self._sums = self._read_variables()
        if changed := self._find_changed():
            model.compute_metrics(None, y, y_pred, None)
            self._check_sums(changed, self._read_variables())
            self._assign(self._sums)

    def _find_changed(self) -> set[int]:
        """Return the unchecked variables that have another finite value than at first."""
        assert self._sums is not None
        assert self._initial is not None
        pairs = [(k, self._initial[k], self._sums[k]) for k in self._unchecked]
        return {k for k, before, after in pairs if np.isfinite(after).all() and not np.array_equal(before, after)}

    def _check_sums(self, chosen: set[int], after_same_batch: list[np.ndarray]) -> None:
        """Note the variables that the same batch has not changed by as much again."""
        assert self._sums is not None
        assert self._initial is not None
        names = [variable.name for variable in self._list_variables()]
        for k in sorted(chosen):
            if not is_sum(self._initial[k], self._sums[k], after_same_batch[k]):
                self._not_sums.append(names[k])
        self._unchecked -= chosen

    def check_batch(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Raise TypeError if a batch shows that ranks can't be added up."""
        tried = self.clone()
        tried.update(output, target)
        tried.check_mergeable()

    def check_mergeable(self) -> None:
        """Raise TypeError if a variable is not a sum."""
        if self._not_sums:
            raise TypeError(
                f"a metric of Keras has the variable {self._not_sums[0]!r}, which is not a sum over batches: the same "
                "batch twice didn't change it twice as much. So it has no value over all engines. Keep sums in its "
                "variables, or compute it from run.model"
            )

    def _list_variables(self) -> list[Any]:
        return [variable for metric in self._get_model().metrics for variable in metric.variables]

    def _read_variables(self) -> list[np.ndarray]:
        return [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._list_variables()]

    def _assign(self, values: list[np.ndarray]) -> None:
        for variable, value in zip(self._list_variables(), values, strict=True):
            variable.assign(value)

    def compute(self) -> dict[str, float]:
        """Return the values by name."""
        is_new = self._model is None
        model = self._get_model()
        if self._sums is not None:
            if is_new and self._example is not None:
                y, y_pred = (keras.ops.convert_to_tensor(value) for value in self._example)
                model.compute_metrics(None, y, y_pred, None)
            self._assign(self._sums)
        values = model.get_metrics_result()
        return {name: float(keras.ops.convert_to_numpy(value)) for name, value in values.items() if name != "loss"}

    def reset(self) -> None:
        """Forget all batches."""
        self._model, self._initial, self._sums = None, None, None
        self._unchecked, self._not_sums = set(), []

    def merge_state(self, other: Self) -> None:
        """Add the batches of another rank. Raises TypeError if a variable is not a sum."""
        if other._sums is None or other._initial is None:
            return
        other.check_mergeable()
        self.check_mergeable()
        if self._sums is None:
            self._sums, self._initial, self._example = other._sums, other._initial, other._example
        else:
            self._sums = [a + (b - start) for a, b, start in zip(self._sums, other._sums, other._initial, strict=True)]

    def list_names(self) -> list[str]:
        """Return the names of the values."""
        return [
            metric if isinstance(metric, str) else getattr(metric, "name", None) or metric.__name__
            for metric in flatten(self._options.metrics)
        ]

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


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return an array; numpy has no bfloat16."""
    tensor = tensor.detach().cpu()
    return np.asarray(tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor)


def is_sum(initial: np.ndarray, after_batch: np.ndarray, after_same_batch: np.ndarray) -> bool:
    """Return whether a batch has changed a variable by as much at the second time as at the first."""
    first, second = after_batch - initial, after_same_batch - after_batch
    if not np.isfinite(first).all():
        return False
    return np.allclose(first, second, rtol=_MAX_ROUNDING, atol=_MAX_ROUNDING * np.abs(first).max(initial=0))

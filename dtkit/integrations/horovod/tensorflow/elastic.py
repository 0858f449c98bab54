"""State of TensorFlow's variables and Keras's models for `elastic.run`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import tensorflow as tf

from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.exceptions import HorovodInternalError
from dtkit.integrations.horovod.tensorflow.functions import broadcast_variables
from dtkit.integrations.horovod.torch import elastic_state
from dtkit.integrations.horovod.torch.elastic_state import ObjectState, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class TensorFlowState(ObjectState):
    """Variables and other objects of a training.

    variables : TensorFlow's or Keras's variables. `session` must be None.
    kwargs : other values are pickled. Each argument becomes an attribute.
    """

    def __init__(self, variables: Sequence[Any], session: None = None, **kwargs: Any) -> None:
        if session is not None:
            raise NotImplementedError("sessions belong to TensorFlow 1; leave session out")
        super().__init__(**kwargs)
        self.variables = list(variables)
        self._values: list[np.ndarray] = []
        self._save_variables()

    def _list_variables(self) -> Sequence[Any]:
        return self.variables

    def _save_variables(self) -> None:
        self._values = [variable.numpy().copy() for variable in self._list_variables()]

    def save(self) -> None:
        """Save the variables and the attributes."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Return to the values that were saved last."""
        for variable, value in zip(self._list_variables(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Overwrite the variables and attributes with another rank's, and save them."""
        broadcast_variables(self._list_variables(), get_context().sync_root)
        self._save_variables()
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """A Keras model, its optimizer and other objects of a training.

    optimizer : by default the compiled one.
    kwargs : other values are pickled. Each argument becomes an attribute.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend  # Keras 1's module of functions
        if not model.built:
            raise ValueError("the model has no variables yet; call model.build(input_shape) first")
        self.model, self.optimizer = model, model.optimizer if optimizer is None else optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__([], **kwargs)

    def _list_variables(self) -> Sequence[Any]:
        return [*self.model.variables, *self.optimizer.variables]


def run(func: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Decorate a training function as PyTorch's `elastic.run` does. Errors in a graph count as failed collectives."""

    @functools.wraps(func)
    def call(state: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.OpError as error:
            if HorovodInternalError.__name__ in str(error):
                raise HorovodInternalError(str(error)) from error
            raise

    return elastic_state.run(call)  # type: ignore[arg-type]  # as elastic_state.run

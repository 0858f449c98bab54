"""Keras models with Keras's tensorflow backend: TensorFlow computes loss and gradients, torch holds the parameters.

A step is two graphs (`tf.function`), one for loss and gradients, and one for the update. Between them, ranks sum the
gradients. All gradients pass between TensorFlow and torch in one flat tensor, as do all parameters after the update.
XLA doesn't compile the graphs, since gradients leave them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import torch

from dtkit._util.torch_private import count_inplace_writes, foreach_copy_, keras_masking
from dtkit.integrations.keras.flat_tensors import FlatLayout
from dtkit.integrations.keras.module import KerasModule, ModelOutput, weigh
from dtkit.integrations.keras.saved_model import finalize

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras

    from dtkit.integrations.keras.compile_options import CompileOptions
    from dtkit.integrations.keras.saved_model import SavedModel

_BFLOAT16 = tf.bfloat16.as_numpy_dtype


class TensorFlowKerasModule(KerasModule):
    """A Keras model whose variables are copies of the module's parameters and buffers."""

    has_gradients_at_once = True  # see :mod:`dtkit.strategies.flat_gradients`

    def __init__(self, saved: SavedModel, options: CompileOptions) -> None:
        super().__init__(saved, options)
        self._pushed: dict[int, tuple[torch.Tensor, int]] = {}
        self._layouts: dict[tuple[int, ...], FlatLayout] = {}
        self._updates: dict[tuple[int, ...], Any] = {}
        self._optimizer: Any = None
        self._make_graphs()

    def _make_graphs(self) -> None:
        self._step = tf.function(self._compute_step, reduce_retracing=True, autograph=False)
        self._evaluate = tf.function(self._compute_output, reduce_retracing=True, autograph=False)

    def _make_parameter(self, variable: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(_to_torch(variable))

    def _make_buffer(self, variable: Any) -> torch.Tensor:
        return _to_torch(variable)

    def push(self) -> None:
        """Copy changed parameters and buffers into TensorFlow's variables."""
        has_new_buffers = False
        for k, (tensor, variable) in enumerate(self._pair_variables()):
            known = self._pushed.get(k)
            if known is None or known[0] is not tensor or known[1] != count_inplace_writes(tensor):
                variable.assign(_to_tensorflow(tensor))
                self._pushed[k] = tensor, count_inplace_writes(tensor)
                has_new_buffers |= k >= len(self.trainable)
        if has_new_buffers and finalize(self.keras_model):
            self._make_graphs()  # they hold the layers' copies as constants

    def load_values(self) -> None:
        """See :class:`KerasModule`."""
        self._pull(0, [*self.trainable, *self.others], self._join_values([*self.trainable, *self.others]))

    def _get_layout(self, variables: Sequence[Any]) -> FlatLayout:
        key = tuple(map(id, variables))
        if key not in self._layouts:
            self._layouts[key] = FlatLayout(variables)
        return self._layouts[key]

    def _join_values(self, variables: Sequence[Any]) -> list[Any]:
        return self._get_layout(variables).join([variable.value for variable in variables])

    def _pull(self, first: int, variables: Sequence[Any], flat: Sequence[Any]) -> None:
        """Copy joined values of TensorFlow's variables into parameters and buffers, from the `first` of these on."""
        if not variables:
            return
        tensors = [tensor for tensor, _ in self._pair_variables()[first : first + len(variables)]]
        with torch.no_grad():
            foreach_copy_(tensors, self._get_layout(variables).split_torch([_to_torch(part) for part in flat]))
        for k, tensor in enumerate(tensors, first):
            self._pushed[k] = tensor, count_inplace_writes(tensor)

    def _pair_variables(self) -> list[tuple[torch.Tensor, Any]]:
        tensors = [*self.parameters(), *self.buffers()]
        return list(zip(tensors, [*self.trainable, *self.others], strict=True))

    def compute(self, inputs: Sequence[torch.Tensor], labels: torch.Tensor | None) -> ModelOutput:
        """See :class:`KerasModule`."""
        self.push()
        if labels is not None and torch.is_grad_enabled():
            loss, logits, *count = _Step.apply(self, (*inputs, labels), *self.parameters())  # type: ignore[no-untyped-call]
            return ModelOutput(weigh(loss, *(count or [None])), logits)
        x, y = _to_inputs(inputs), None if labels is None else _to_tensorflow(labels)
        value, output, mask, count = self._evaluate(x, y, training=self.training)
        logits = _to_torch(output)
        if mask is not None:
            keras_masking.set_keras_mask(logits, _to_torch(mask))  # for metrics
        loss = None if labels is None else weigh(_to_torch(value), None if count is None else _to_torch(count))
        return ModelOutput(loss, logits)

    def _compute_output(self, x: Any, y: Any, *, training: bool) -> tuple[Any, Any, Any, Any]:
        """Return loss, output, its mask, and the number of targets in the loss; the last two may be None."""
        output = self.keras_model(x, training=training)
        mask = keras_masking.get_keras_mask(output)
        if y is None:
            return tf.zeros(()), output, mask, None
        loss = self.keras_model.compute_loss(x=x, y=y, y_pred=output, training=training)
        return loss, output, mask, self.count_targets(output)

    def _compute_step(self, x: Any, y: Any, *, training: bool) -> tuple[Any, ...]:
        """Return loss, output, number of targets, an empty tuple for each gradient or None, gradients, and others.

        The others are the variables that the step may have changed, in training. They and the gradients are joined.
        """
        with tf.GradientTape() as tape:
            loss, output, _, count = self._compute_output(x, y, training=training)
        gradients = tape.gradient(loss, [variable.value for variable in self.trainable])
        used = [variable for variable, gradient in zip(self.trainable, gradients, strict=True) if gradient is not None]
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
        marks = [None if gradient is None else () for gradient in gradients]
        others = self._join_values(self.others) if training else []
        return loss, output, count, marks, self._get_layout(used).join(dense), others

    def run_step(self, batch: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], JoinedGradients]:
        """Return (loss, output and the number of targets, if known), and gradients.

        In training, also copy the variables that the step changes.
        """
        x, y = _to_inputs(batch[:-1]), _to_tensorflow(batch[-1])
        loss, output, count, marks, gradients, others = self._step(x, y, training=self.training)
        if self.training:
            self._pull(len(self.trainable), self.others, others)
        values = [_to_torch(value) for value in (loss, output, count) if value is not None]
        used = [mark is not None for mark in marks]
        layout = self._get_layout([v for v, is_used in zip(self.trainable, used, strict=True) if is_used])
        return values, JoinedGradients(used, layout, [_to_torch(part) for part in gradients])

    def apply_gradients(self, optimizer: keras.optimizers.Optimizer) -> None:
        """See :class:`KerasModule`."""
        self.push()
        pairs = [(p.grad, v) for p, v in zip(self.parameters(), self.trainable, strict=True) if p.grad is not None]
        if not pairs:
            return
        gradients, variables = zip(*pairs, strict=True)
        flat = [_to_tensorflow(part) for part in self._get_layout(variables).join_torch(gradients)]
        self._pull(0, self.trainable, self._get_update(optimizer, variables)(flat))

    def _get_update(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> Any:
        """Return a graph that updates variables from their joined gradients, and returns all trainable ones joined."""
        if optimizer is not self._optimizer:
            self._optimizer, self._updates = optimizer, {}
        key = tuple(map(id, variables))
        if key not in self._updates:

            def update(flat: Sequence[Any]) -> list[Any]:
                optimizer.apply(self._get_layout(variables).split(flat), list(variables))
                return self._join_values(self.trainable)

            self._updates[key] = tf.function(update, autograph=False)
        return self._updates[key]


@dataclasses.dataclass(frozen=True)
class JoinedGradients:
    """Gradients of a module's parameters."""

    used: Sequence[bool]
    """Whether each parameter has a gradient."""
    layout: FlatLayout
    """Of those that have one."""
    flat: Sequence[torch.Tensor]

    def scale(self, factor: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients times a factor."""
        scaled = iter(self.layout.split_torch([part * factor for part in self.flat]))
        return [next(scaled) if is_used else None for is_used in self.used]


class _Step(torch.autograd.Function):
    """A TensorFlow step as a torch operation, from the parameters to the loss."""

    @staticmethod
    def forward(
        ctx: Any, module: TensorFlowKerasModule, batch: Sequence[torch.Tensor], *_parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return (loss, output), and the number of targets in the loss, if known."""
        (loss, *others), ctx.gradients = module.run_step(batch)
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the parameters."""
        return None, None, *ctx.gradients.scale(gradients[0])


def _to_inputs(inputs: Sequence[torch.Tensor]) -> Any:
    converted = [_to_tensorflow(tensor) for tensor in inputs]
    return converted[0] if len(converted) == 1 else converted


def _to_tensorflow(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:  # which torch doesn't give to numpy
        return tf.convert_to_tensor(tensor.detach().cpu().view(torch.uint16).numpy().view(_BFLOAT16))
    return tf.convert_to_tensor(tensor.detach().cpu().numpy())


def _to_torch(value: Any) -> torch.Tensor:
    array = np.array(value)
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)

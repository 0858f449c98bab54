"""Keras models with Keras's tensorflow backend: TensorFlow computes loss and gradients, torch holds the parameters.

Each step copies parameters into TensorFlow's variables, and gradients to torch, through numpy. The step is one graph
(`tf.function`). XLA doesn't compile it, since its gradients leave the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
import torch

from dtkit._util.torch_private import count_inplace_writes, keras_masking
from dtkit.integrations.keras.module import KerasModule, ModelOutput, weigh
from dtkit.integrations.keras.saved_model import finalize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.keras.compile_options import CompileOptions
    from dtkit.integrations.keras.saved_model import SavedModel


class TensorFlowKerasModule(KerasModule):
    """A Keras model whose variables are copies of the module's parameters and buffers."""

    def __init__(self, saved: SavedModel, options: CompileOptions) -> None:
        super().__init__(saved, options)
        self._pushed: dict[int, tuple[torch.Tensor, int]] = {}
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
        self.pull([*self.trainable, *self.others])

    def pull(self, variables: Sequence[Any]) -> None:
        """Copy TensorFlow's variables into the parameters or buffers."""
        chosen = {id(variable) for variable in variables}
        with torch.no_grad():
            for k, (tensor, variable) in enumerate(self._pair_variables()):
                if id(variable) in chosen:
                    tensor.copy_(_to_torch(variable))
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
        return loss, output, mask, self.counter.count(output)

    def _compute_step(self, x: Any, y: Any, *, training: bool) -> tuple[Any, Any, Any, list[Any]]:
        with tf.GradientTape() as tape:
            loss, output, _, count = self._compute_output(x, y, training=training)
        gradients = tape.gradient(loss, [variable.value for variable in self.trainable])
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        return loss, output, count, dense

    def run_step(self, batch: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return (loss, output and the number of targets, if known), and gradients.

        In training, also copy the variables that the step changes.
        """
        x, y = _to_inputs(batch[:-1]), _to_tensorflow(batch[-1])
        loss, output, count, gradients = self._step(x, y, training=self.training)
        if self.training and self.others:
            self.pull(self.others)
        values = [_to_torch(value) for value in (loss, output, count) if value is not None]
        return values, [None if g is None else _to_torch(g) for g in gradients]

    def apply_gradients(self, optimizer: keras.optimizers.Optimizer) -> None:
        """See :class:`KerasModule`."""
        self.push()
        pairs = [
            (_to_tensorflow(p.grad), variable)
            for p, variable in zip(self.parameters(), self.trainable, strict=True)
            if p.grad is not None
        ]
        optimizer.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        self.pull(self.trainable)


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
        scale = gradients[0]
        return (None, None, *(None if g is None else g * scale for g in ctx.gradients))


def _to_inputs(inputs: Sequence[torch.Tensor]) -> Any:
    converted = [_to_tensorflow(tensor) for tensor in inputs]
    return converted[0] if len(converted) == 1 else converted


def _to_tensorflow(tensor: torch.Tensor) -> Any:
    return tf.convert_to_tensor(tensor.detach().cpu().numpy())


def _to_torch(value: Any) -> torch.Tensor:
    return torch.tensor(keras.ops.convert_to_numpy(value))

"""Keras models with Keras's tensorflow backend: TensorFlow computes loss and gradients, torch holds the parameters.

Each step copies parameters into TensorFlow's variables, and gradients to torch, through numpy. The step is one graph
(`tf.function`). XLA doesn't compile it, since its gradients leave the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
import torch

from dtkit._util.torch_private import count_inplace_writes
from dtkit.integrations.keras.module import KerasModule, ModelOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.keras.compile_options import CompileOptions
    from dtkit.integrations.keras.saved_model import SavedModel


class TensorFlowKerasModule(KerasModule):
    """A Keras model whose variables are copies of the module's parameters and buffers."""

    def __init__(self, saved: SavedModel, options: CompileOptions) -> None:
        super().__init__(saved, options)
        self._pushed: dict[int, tuple[torch.Tensor, int]] = {}
        self._step = tf.function(self._compute_step, reduce_retracing=True, autograph=False)
        self._evaluate = tf.function(self._compute_output, reduce_retracing=True, autograph=False)

    def _make_parameter(self, variable: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(_to_torch(variable))

    def _make_buffer(self, variable: Any) -> torch.Tensor:
        return _to_torch(variable)

    def push(self) -> None:
        """Copy changed parameters and buffers into TensorFlow's variables."""
        for k, (tensor, variable) in enumerate(self._pair_variables()):
            known = self._pushed.get(k)
            if known is None or known[0] is not tensor or known[1] != count_inplace_writes(tensor):
                variable.assign(_to_tensorflow(tensor))
                self._pushed[k] = tensor, count_inplace_writes(tensor)

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
            loss, logits = _Step.apply(self, (*inputs, labels), *self.parameters())  # type: ignore[no-untyped-call]
            return ModelOutput(loss, logits)
        x, y = _to_inputs(inputs), None if labels is None else _to_tensorflow(labels)
        value, output = self._evaluate(x, y, training=self.training)
        return ModelOutput(None if labels is None else _to_torch(value), _to_torch(output))

    def _compute_output(self, x: Any, y: Any, *, training: bool) -> tuple[Any, Any]:
        output = self.keras_model(x, training=training)
        if y is None:
            return tf.zeros(()), output
        return self.keras_model.compute_loss(x=x, y=y, y_pred=output, training=training), output

    def _compute_step(self, x: Any, y: Any, *, training: bool) -> tuple[Any, Any, list[Any]]:
        with tf.GradientTape() as tape:
            loss, output = self._compute_output(x, y, training=training)
        gradients = tape.gradient(loss, [variable.value for variable in self.trainable])
        return loss, output, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]

    def run_step(self, batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        """Return loss, output and gradients. In training, also copy the variables that the step changes."""
        x, y = _to_inputs(batch[:-1]), _to_tensorflow(batch[-1])
        loss, output, gradients = self._step(x, y, training=self.training)
        if self.training and self.others:
            self.pull(self.others)
        return _to_torch(loss), _to_torch(output), [None if g is None else _to_torch(g) for g in gradients]

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss, output)."""
        loss, output, ctx.gradients = module.run_step(batch)
        ctx.mark_non_differentiable(output)
        return loss, output

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

"""Keras models with Keras's torch backend: variables are torch parameters already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit.integrations.keras.module import KerasModule, ModelOutput, weigh

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras


class TorchKerasModule(KerasModule):
    """A Keras model whose variables are the module's parameters and buffers themselves."""

    loss_dtype = "float32"  # also for a model in float64, since this backend's means and divisions round

    def _make_parameter(self, variable: Any) -> torch.nn.Parameter:
        parameter: torch.nn.Parameter = variable.value
        return parameter

    def _make_buffer(self, variable: Any) -> torch.Tensor:
        data: torch.Tensor = variable.value.data
        return data

    def compute(self, inputs: Sequence[torch.Tensor], labels: torch.Tensor | None) -> ModelOutput:
        """See :class:`KerasModule`."""
        model = self.keras_model
        x = inputs[0] if len(inputs) == 1 else list(inputs)
        logits = model(x, training=self.training)
        if labels is None:
            return ModelOutput(None, logits)
        loss = model.compute_loss(x=x, y=labels, y_pred=logits, training=self.training)
        return ModelOutput(weigh(loss, self.count_targets(logits)), logits)

    def apply_gradients(self, optimizer: keras.optimizers.Optimizer) -> None:
        """See :class:`KerasModule`."""
        pairs = [(v.value.grad, v) for v in self.trainable if v.value.grad is not None]
        with torch.no_grad():
            optimizer.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

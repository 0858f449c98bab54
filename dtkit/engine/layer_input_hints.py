"""Remedies where a model or one of its layers gets something else than a tensor."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

from dtkit.engine.loss_hints import is_loss

if TYPE_CHECKING:
    import torch


def explain_whole_batch(error: Exception, batch: Any, model: torch.nn.Module) -> str | None:
    """Return the remedy where a training step gives the model a whole batch, with the targets."""
    calls = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
    given = next((local.get("args") for local in calls if local.get("self") is model and "args" in local), None)
    if not isinstance(batch, (list, tuple)) or len(batch) < 2 or not given or len(given) != 1:
        return None
    if type(given[0]) is not type(batch) or len(given[0]) != len(batch) or not _look_alike(given[0][-1], batch[-1]):
        return None
    return (
        f"The model gets the whole batch, which is a {type(batch).__name__} of {len(batch)} with the targets last. "
        "Give it the inputs, as in training_step=lambda model, batch: loss(model(batch[0]), batch[-1])"
    )


def _look_alike(value: Any, target: Any) -> bool:
    """Return whether a value has the type and the shape of a batch's targets."""
    return type(value) is type(target) and getattr(value, "shape", None) == getattr(target, "shape", None)


def explain_layer_input(message: str, inputs: Any) -> str | None:
    """Return the remedy where a layer gets something else than a tensor: from the data, or from the layer before it."""
    value = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
    found = re.search(r"^(\w+)\(\): argument '(?:input|indices)' \(position \d\) must be Tensor, not (\w+)", message)
    if found is None or is_loss(found[1]) or found[2] == "str":
        return None
    if isinstance(value, dict) and found[2] == "dict":
        keys = list(value)
        return (
            f"The inputs of a batch are a dict with {', '.join(map(repr, keys[:6]))}, which the model gets as it is. "
            f"Choose the tensors in its forward, as in inputs[{keys[-1]!r}], or have the Dataset return a tensor"
        )
    if isinstance(value, (list, tuple)) and found[2] == type(value).__name__:
        return (
            f"The inputs of a batch are a {found[2]} of {len(value)} values, and a layer needs one tensor. Have "
            "collate_fn return one, as in torch.stack(inputs)"
        )
    return (
        f"{found[1]}() within the model gets a {found[2]}, which the layer before it returns, as nn.LSTM and nn.GRU "
        "do. Choose the tensor in forward, as in outputs, _ = self.lstm(inputs)"
    )

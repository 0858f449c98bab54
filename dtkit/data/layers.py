"""The summary of a model: its layers with their parameters, at most as many as fit a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.types import LayerSummary, ModelSummary

if TYPE_CHECKING:
    import torch

MAX_LAYERS = 60
"""Layers that a summary lists. A deeper model is cut at the depth that fits."""


def summarize_model(model: torch.nn.Module) -> ModelSummary:
    """Return the parameters and the layers of a model, at the largest depth that fits into ``MAX_LAYERS``."""
    layers: list[LayerSummary] = []
    for depth in range(1, 100):
        deeper = list_layers(model, depth)
        if len(deeper) > MAX_LAYERS or deeper == layers:
            break
        layers = deeper
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    kind = getattr(model, "model_name", type(model).__name__)
    return ModelSummary(sum(p.numel() for p in parameters), trainable, tuple(layers), kind)


def list_layers(model: torch.nn.Module, max_depth: int) -> list[LayerSummary]:
    """Return the modules at a depth, and those above it that have no children."""
    layers = []
    for name, module in model.named_modules():
        depth = name.count(".") + 1 if name else 0
        is_leaf = next(module.children(), None) is None
        if name and (depth == max_depth or (is_leaf and depth < max_depth)):
            count = sum(p.numel() for p in module.parameters())
            layers.append(LayerSummary(name, type(module).__name__, count))
    return layers

"""torch's losses with class weights, as a pair (sum, weight).

Their mean is divided by the weights of the rows at hand. So the mean of the ranks' means is not the mean of a batch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


class ClassWeightedLoss(torch.nn.Module):
    """Sum of a loss, and of the weights by which torch would divide it."""

    def __init__(self, loss: torch.nn.CrossEntropyLoss | torch.nn.NLLLoss) -> None:
        super().__init__()
        self._loss = copy.deepcopy(loss)
        self._loss.reduction = "sum"

    def forward(self, output: Any, target: Any) -> tuple[torch.Tensor, Any]:
        """Return (sum, weight)."""
        class_weights = self._loss.weight
        assert class_weights is not None
        if isinstance(output, torch.Tensor):
            _check_weights(class_weights, output)
            class_weights = class_weights.to(output.device)
            self._loss.weight = class_weights
        total = self._loss(output, target)
        if target.is_floating_point():  # probabilities of the classes: torch divides by the number of samples
            return total, target.numel() // target.shape[1 if target.dim() > 1 else 0]
        counts = target != self._loss.ignore_index
        # A mask instead of a selection keeps shapes independent of values, which dry runs don't have.
        weights = class_weights[torch.where(counts, target, 0)] * counts
        return total, weights.sum(dtype=torch.float64)


def _check_weights(weights: torch.Tensor, output: torch.Tensor) -> None:
    num_classes = output.shape[1] if output.dim() > 1 else output.numel()
    if len(weights) != num_classes:
        raise ValueError(
            f"the loss has {len(weights)} class weights, and the model's output {num_classes} classes; it needs one "
            "weight for each class. Give as many weights as the last layer has outputs"
        )
    if weights.dtype is torch.float64 and output.dtype is not torch.float64:
        raise TypeError(
            f"the loss has class weights in float64, as numpy makes them, and the model's output is {output.dtype}; "
            "convert them, as in weight=w.float()"
        )


def convert_class_weights(loss: Any) -> Any:
    """Return a loss of torch's with class weights as a pair, and any other loss as it is."""
    if type(loss) not in (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss):
        return loss
    return loss if loss.weight is None or loss.reduction != "mean" else ClassWeightedLoss(loss)

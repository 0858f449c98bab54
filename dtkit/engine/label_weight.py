"""Detection of losses that are means over labels (tokens) instead of samples.

If some labels are ignored, ranks have unequal numbers of labels. The mean of the ranks' means is then not the batch's
mean. Hugging Face's Trainer had this bug (transformers issues 34242 and 37474). If dtkit can detect which labels a loss
counts, it weights each rank's mean by their number.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch

from dtkit.engine.data.random_state import preserve_generators, seed_generators
from dtkit.engine.data.sources import map_tensors
from dtkit.strategies import router_loss
from dtkit.strategies.loss import DEFAULT_IGNORE_INDEX, LabelWeight, get_labels
from dtkit.strategies.module_backup import undo_module_writes
from dtkit.strategies.module_modes import module_eval_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.strategies.loss import Loss

_MAX_TRIED_PARAMETERS = 50_000_000  # a larger model takes seconds on a host
_TOLERANCE, _NOISE = 1e-4, 0.1
_SKIPPING_LOSS_TYPES = ("ForCausalLM",)
_PLAIN_LOSS_TYPES = ("ForMaskedLM", "ForTokenClassification")


def find_label_weight(
    loss: Loss, model: torch.nn.Module, make_sample_batch: Callable[[int], Any], all_labels: torch.Tensor | None
) -> LabelWeight | None:
    """Return the weight of a loss that is a mean over labels; None for a mean over samples, or if unknown.

    `all_labels` are those of the whole data, if they are known. A Keras model returns the weight with the loss itself.
    """
    ignore_index = getattr(loss.loss_fn, "ignore_index", DEFAULT_IGNORE_INDEX)
    has_none_to_ignore = all_labels is not None and not bool((all_labels == ignore_index).any())
    if has_none_to_ignore or getattr(model, "weighs_labels", False):
        return None
    batch = make_sample_batch(2)
    labels = get_labels(batch)
    if not _may_be_ignored(labels, is_known=all_labels is not None):
        return None
    if hasattr(loss.loss_fn, "ignore_index"):
        return LabelWeight(ignore_index)  # train() refuses other reductions, and class weights give a pair
    loss_type = getattr(model, "loss_type", None)
    if loss_type in _SKIPPING_LOSS_TYPES + _PLAIN_LOSS_TYPES:
        return LabelWeight(ignore_index, skips_first=loss_type in _SKIPPING_LOSS_TYPES)
    if sum(p.numel() for p in model.parameters()) > _MAX_TRIED_PARAMETERS:
        return None
    trial = _Trial(loss, _mask_labels(batch, labels, ignore_index), ignore_index)
    return trial.find_weight(model)


def _may_be_ignored(labels: Any, *, is_known: bool) -> bool:
    """Return whether labels may contain the ignored one: either they do, or each sample has several labels."""
    is_integer = isinstance(labels, torch.Tensor) and not (labels.is_floating_point() or labels.is_complex())
    return is_integer and labels.dtype is not torch.bool and labels.dim() >= 1 and (is_known or labels.dim() >= 2)


def _mask_labels(batch: Any, labels: torch.Tensor, ignore_index: int) -> Any:
    """Return a batch of two samples with so few labels that each way to count them gives a different mean.

    Labels that are ignored already, such as those of padding, get another one's value.
    """
    counted = labels[labels != ignore_index]
    if len(counted):
        labels = torch.where(labels == ignore_index, counted[0], labels)
    masked = torch.full_like(labels, ignore_index)
    if labels.dim() == 1:
        masked[1:] = labels[1:]
    else:
        masked[0, ..., :1], masked[0, ..., -1:] = labels[0, ..., :1], labels[0, ..., -1:]
        masked[1:, ..., -3:] = labels[1:, ..., -3:]
    return {**batch, "labels": masked} if isinstance(batch, dict) else (*batch[:-1], masked)


class _Trial:
    """Comparison of the loss of two samples with the losses of each."""

    def __init__(self, loss: Loss, batch: Any, ignore_index: int) -> None:
        self._loss, self._batch = loss, batch
        self._parts = [_take_row(batch, 0), _take_row(batch, 1)]
        self._candidates = LabelWeight(ignore_index), LabelWeight(ignore_index, skips_first=True)

    def find_weight(self, model: torch.nn.Module, *, is_perturbed: bool = False) -> LabelWeight | None:
        """Return the weight with which the two losses give the loss of both; None if there is none."""
        try:
            whole, *parts = (self._compute_loss(model, batch) for batch in (self._batch, *self._parts))
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
            return None  # if it is the model's own error, the first step raises it
        if whole is None or None in parts:
            return None
        losses = [value for value in parts if value is not None]
        if _is_close(*losses):  # such as for a model with a zero head, which predicts the same everywhere
            return None if is_perturbed else self.find_weight(_perturb(model), is_perturbed=True)
        if _is_close(whole, sum(losses) / 2):
            return None
        return next((weight for weight in self._candidates if _is_close(whole, self._average(losses, weight))), None)

    def _average(self, losses: list[float], weight: LabelWeight) -> float:
        counts = [int(weight.count(get_labels(part))) for part in self._parts]
        total = sum(value * count for value, count in zip(losses, counts, strict=True) if count)
        return total / sum(counts) if sum(counts) else math.nan

    def _compute_loss(self, model: torch.nn.Module, batch: Any) -> float | None:
        """Return the mean loss in evaluation, with fixed random numbers; None for a pair."""
        without_routers = router_loss.leave_out(model, self._loss.training_step)
        with undo_module_writes(model), module_eval_mode(model), preserve_generators(), without_routers:
            seed_generators(0)
            value, weight = self._loss(model, batch)
        return None if weight is not None else float(value)


def _perturb(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the model with noise on its parameters."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=_NOISE)
    return model


def _take_row(batch: Any, row: int) -> Any:
    return map_tensors(batch, lambda tensor: tensor[row : row + 1] if tensor.shape[:1] == (2,) else tensor)


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))

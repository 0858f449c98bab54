"""Checks of a loss on a few rows: whether ranks can take its parts, and whether its gradients reach the model.

Each rank computes the loss of its part of a batch, and the mean of these losses counts. For a mean over samples, that
equals the loss of the whole batch. It doesn't for a sum, for class weights, or for a loss that compares samples. A loss
that refers to the notebook's model has a copy of it on the engines, which is never trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import run_guarded
from dtkit.data.pairing import Pairing, are_transposed
from dtkit.engine.data.sources import map_tensors
from dtkit.engine.label_weight import find_label_weight
from dtkit.strategies import router_loss
from dtkit.strategies.loss import WEIGHTED_LOSS_EXAMPLE, get_labels
from dtkit.strategies.module_modes import module_eval_mode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dtkit.strategies.loss import Loss

_TOLERANCE, _DOUBLE_TOLERANCE = 2e-5, 1e-6
SUM_REMEDY = "Return the mean over samples, or a pair (sum, number of samples)."
"""What to do about a loss or a metric that is a sum."""


_SIZE_WARNING = re.compile(
    r"Using a target size \(torch\.Size\(\[([\d, ]*)\]\)\) that is different to "
    r"the input size \(torch\.Size\(\[([\d, ]*)\]\)\)"
)
"""What torch's losses warn of, such as `torch.nn.functional.mse_loss`."""


def check_target_shape(warnings: Iterable[str]) -> None:
    """Raise PairedRowsError if a loss repeats targets that have another number of axes than outputs, or are transposed.

    The loss then compares each output with every target. The strings are the warnings that it has caused.
    """
    for match in filter(None, map(_SIZE_WARNING.search, warnings)):
        target, output = (tuple(int(size) for size in text.split(", ") if size) for text in match.groups())
        if len(target) != len(output) or are_transposed(output, target):
            raise Pairing(output, target).make_error("the loss")


def check_gradients_reach_model(loss: torch.Tensor, model: torch.nn.Module) -> None:
    """Raise ValueError if a loss depends on a copy of the model's parameters, which its code has captured."""
    own = dict(model.named_parameters())
    own_ids = {id(p) for p in own.values()}
    for leaf in _find_leaves(loss):
        if id(leaf) in own_ids:
            continue
        name = next((name for name, p in own.items() if p.shape == leaf.shape and torch.equal(p, leaf)), None)
        if name is not None:
            raise ValueError(
                f"the loss uses the notebook's model by its own name ({name}). Engines get a copy of that, which stays "
                "as it is, so this part of the loss would never train. Use the model that training_step(model, batch) "
                "gets. If a fixed copy is meant, call requires_grad_(False) on it"
            )


def has_trainable(model: torch.nn.Module) -> bool:
    """Return whether a model has parameters to train."""
    return any(p.requires_grad for p in model.parameters())


def _find_leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a loss would give gradients to."""
    leaves, seen, pending = [], set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        pending += [function for function, _ in node.next_functions]
    return leaves


def describe_parts(loss: Loss, model: torch.nn.Module, batch: Any, *, shares_router_losses: bool = False) -> str | None:
    """Return a warning if the loss of a batch is not the mean over its samples; else, or if unknown, None.

    With `shares_router_losses`, those of a mixture of experts are left out, since ranks compute them together. Raises
    ValueError for a sum over samples. Runs the model in evaluation.
    """
    num_rows = count_rows(batch)
    if num_rows < 2:
        return None
    loss = _weigh_labels(loss, model, batch)
    with router_loss.leave_out(model, loss.training_step) if shares_router_losses else contextlib.nullcontext():
        # silent: the model may need what a part of these rows doesn't have
        losses = run_guarded(lambda: _compute_parts(loss, model, _vary_target(batch), num_rows), lambda _: None)
    if losses is None:
        return None
    whole, total, mean = losses
    if not math.isfinite(whole) or not math.isfinite(mean):
        return None
    tolerance = _get_tolerance(model)
    has_routers = not shares_router_losses and _has_router_loss(loss, model, batch)
    if is_close(whole, mean, tolerance) and not has_routers:
        return None
    if is_close(whole, total, tolerance):
        raise ValueError(
            "the loss is a sum over samples: it grows with the batch, and ranks have parts of a batch. "
            f"{SUM_REMEDY} With a loss of torch, use reduction='mean'"
        )
    return (
        f"the loss of {num_rows} rows ({whole:.6g}) is not the mean of the losses of its parts ({mean:.6g}), and each "
        f"rank computes the loss of its own part: training differs from one process. {_ROUTERS if has_routers else ''}"
        f"With weights, return a pair (sum, weight): {WEIGHTED_LOSS_EXAMPLE}"
    )


_ROUTERS = (
    "The routers' loss of a mixture of experts is such a loss. Ranks compute it together if a step has no "
    "micro-batches: use DataParallel(), Sharded() or TensorParallel() without accumulate. "
)


def _has_router_loss(loss: Loss, model: torch.nn.Module, batch: Any) -> bool:
    """Return whether the routers' loss of a mixture of experts is a part of the loss."""
    if not router_loss.find_namespaces(model, loss.training_step):
        return False
    with module_eval_mode(model):
        whole = _compute(loss, model, batch)
        with router_loss.leave_out(model, loss.training_step):
            return _compute(loss, model, batch) != whole


def _get_tolerance(model: torch.nn.Module) -> float:
    """Return the relative difference that rounding explains; transformers rounds losses to float32."""
    is_double = all(p.dtype == torch.float64 for p in model.parameters())
    return _DOUBLE_TOLERANCE if is_double else _TOLERANCE


def _weigh_labels(loss: Loss, model: torch.nn.Module, batch: Any) -> Loss:
    """Return the loss as engines compute it: with a weight, if it is a mean over labels."""
    labels = get_labels(batch)
    all_labels = labels if isinstance(labels, torch.Tensor) and labels.dim() == 1 else None
    weight = find_label_weight(loss, model, lambda num_rows: take_rows(batch, slice(0, num_rows)), all_labels)
    return dataclasses.replace(loss, label_weight=weight)


def _compute_parts(loss: Loss, model: torch.nn.Module, batch: Any, num_rows: int) -> tuple[float, float, float] | None:
    """Return the loss of a batch, and the sum and mean of those of two parts; None for random losses.

    Parts of a pair are weighted by its weights, not by their rows. Their sum is NaN then, as it says nothing.
    """
    cut = max(1, num_rows // 3)
    with module_eval_mode(model):
        whole, again = _compute(loss, model, batch), _compute(loss, model, batch)
        first = _compute(loss, model, take_rows(batch, slice(0, cut)))
        last = _compute(loss, model, take_rows(batch, slice(cut, num_rows)))
    if whole != again:
        return None
    (total, weight), (first_sum, first_weight), (last_sum, last_weight) = whole, first, last
    if weight is None or first_weight is None or last_weight is None:
        return total, first_sum + last_sum, (cut * first_sum + (num_rows - cut) * last_sum) / num_rows
    if not weight or not first_weight + last_weight:
        return None
    return total / weight, math.nan, (first_sum + last_sum) / (first_weight + last_weight)


def _compute(loss: Loss, model: torch.nn.Module, batch: Any) -> tuple[float, float | None]:
    value, weight = loss(model, batch)
    return float(value), None if weight is None else float(weight)


def count_rows(batch: Any) -> int:
    """Return the number of rows of a nested batch; 0 if its tensors differ in length."""
    lengths: set[int] = set()

    def add(tensor: torch.Tensor) -> torch.Tensor:
        lengths.add(len(tensor) if tensor.dim() else 0)
        return tensor

    map_tensors(batch, add)
    return lengths.pop() if len(lengths) == 1 else 0


def take_rows(batch: Any, rows: slice) -> Any:
    """Return a part of a nested batch."""
    return map_tensors(batch, lambda tensor: tensor[rows])


def _vary_target(batch: Any) -> Any:
    """Return a batch whose targets have two classes if its rows have only one: classes may have weights."""
    target = batch[-1] if isinstance(batch, tuple) and len(batch) > 1 else None
    if not isinstance(target, torch.Tensor) or target.dim() != 1 or target.dtype != torch.int64:
        return batch
    if bool((target != target[0]).any()):
        return batch
    varied = target.clone()
    varied[-1] = 0 if target[0] else 1
    return (*batch[:-1], varied)


def is_close(a: float, b: float, tolerance: float) -> bool:
    """Return whether two numbers are equal, except for a relative difference."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b))

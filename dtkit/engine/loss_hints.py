"""Remedies for errors of a loss, based on the model's output and the targets of a batch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from dtkit.strategies.loss import DEFAULT_IGNORE_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DETACHED_MESSAGE = "does not require grad and does not have a grad_fn"
"""Part of torch's error for a loss that is cut off from the parameters."""
_MAX_LABELS = 2**25
"""Number of labels up to which their range is found in about 50 ms."""


def list_hints(
    message: str, target: Any, model: torch.nn.Module, all_labels: torch.Tensor | None = None
) -> list[str | None]:
    """Return a remedy, or None, for each kind of error that a loss has with its output or target."""
    return [
        _explain_output_shape(message),
        _explain_transposed(message, model),
        _explain_class_labels(message),
        _explain_output_columns(message, target),
        _explain_output_dimensions(message),
        _explain_flat_output(message),
        _explain_output_type(message),
        _explain_output_attribute(message),
        _explain_probabilities(message),
        _explain_detached(message),
        _explain_swapped_loss(message),
        _explain_target_type(message),
        _explain_target(message, target),
        _explain_class_range(message, target, model, all_labels),
    ]


def is_loss(function: str) -> bool:
    """Return whether torch's function of this name is a loss, such as "cross_entropy_loss"."""
    return re.search("loss|entropy|kl_div|gaussian_nll", function) is not None


def _explain_output_shape(message: str) -> str | None:
    """Return the remedy where a loss needs equal shapes, and outputs have a last dimension of 1."""
    sizes = re.search(r"arget size \(torch\.Size\(\[(\d+)\]\)\) .*input size \(torch\.Size\(\[(\d+), 1\]\)\)", message)
    if sizes is None or sizes[1] != sizes[2]:
        return None
    return (
        f"The outputs of a batch have shape ({sizes[2]}, 1), and the targets ({sizes[1]},); they must be equal. "
        "Convert the targets, as in y.reshape(-1, 1), or the outputs, as in output.squeeze(1)"
    )


def _explain_transposed(message: str, model: torch.nn.Module) -> str | None:
    """Return the remedy where a loss gets an output whose columns are samples."""
    rows = re.search(r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)", message)
    sizes = [m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear)]
    if rows is not None and sizes and sizes[-1] == int(rows[1]):
        return (
            f"The loss takes rows as samples. It gets {rows[1]} rows of outputs, as many as the model's last layer has "
            f"outputs, for {rows[2]} targets: the output looks transposed. Leave .T or transpose() out"
        )
    pair = re.search(
        r"arget size \(torch\.Size\(\[(\d+), (\d+)\]\)\) .*input size \(torch\.Size\(\[(\d+), (\d+)\]\)\)", message
    )
    if pair is None or pair.group(1, 2) != pair.group(4, 3) or pair[1] == pair[2]:
        return None
    return (
        f"The outputs have shape ({pair[3]}, {pair[4]}), and the targets ({pair[1]}, {pair[2]}): one of both looks "
        "transposed. Leave .T or transpose() out"
    )


def _explain_output_columns(message: str, target: Any) -> str | None:
    """Return the remedy where a loss compares several outputs of a sample with its one target."""
    sizes = re.search(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dim.* 1", message)
    targets = next(iterate_tensors(target), None)
    if sizes is None or targets is None or targets.dim() != 1 or int(sizes[2]) != len(targets):
        return None
    return (
        f"The model has {sizes[1]} outputs for each sample, and the targets have shape ({sizes[2]},), one number for "
        "each sample. For class labels use nn.CrossEntropyLoss(); for one number, end the model with nn.Linear(..., 1) "
        "and reshape the targets, as in y.reshape(-1, 1)"
    )


def _explain_output_type(message: str) -> str | None:
    """Return the remedy where a loss of torch gets what the model returned, and that is not a tensor."""
    found = re.search(r"(\w+)\(\): argument 'input' \(position 1\) must be Tensor, not (\w+)", message)
    if found is None or not is_loss(found[1]):
        return None
    kind = found[2]
    if kind == "NoneType":
        return "The model returns None, and the loss needs its output; end forward() with return, as in return output"
    key = "['logits']" if kind in ("dict", "OrderedDict") else "[0]" if kind in ("tuple", "list") else ".logits"
    return (
        f"The loss gets what the model returns as its output, and that is of type {kind}. Choose the tensor, as in "
        f"loss=lambda output, target: nn.functional.cross_entropy(output{key}, target)"
    )


def _explain_class_labels(message: str) -> str | None:
    """Return the remedy where a loss of yes or no for each class gets one label for each sample."""
    sizes = re.search(
        r"arget size \(torch\.Size\(\[(\d+)(, 1)?\]\)\) .*input size \(torch\.Size\(\[(\d+), (\d+)\]\)\)", message
    )
    if sizes is None or sizes[1] != sizes[3] or sizes[4] == "1":
        return None
    return (
        f"The model has {sizes[4]} outputs for each sample, and the targets are one number for each. For one of "
        f"{sizes[4]} classes use nn.CrossEntropyLoss(). For several at once, give targets of 0 and 1 of shape "
        f"({sizes[1]}, {sizes[4]}), as floats"
    )


def _explain_flat_output(message: str) -> str | None:
    """Return the remedy where a loss of classes gets outputs with one dimension only."""
    found = re.search(r"For 1D input, 1D target must have size 1, but got target size: (\d+)", message)
    if found is None:
        return None
    return (
        f"The outputs of a batch have one dimension, and a loss of classes takes ({found[1]}, number of classes) for "
        f"{found[1]} targets. Leave out what makes the output flat, such as nn.Flatten(0) or squeeze(). Where each "
        "sample has one number as its output, use nn.MSELoss() or nn.BCEWithLogitsLoss()"
    )


def _explain_output_dimensions(message: str) -> str | None:
    """Return the remedy where outputs of a cross entropy have further dimensions, such as positions."""
    sizes = re.search(r"[Ee]xpected target size \[(\d+(?:, \d+)+)\], got \[([\d, ]+)\]", message)
    if sizes is None:
        return None
    start = (
        f"The outputs have the classes in their second dimension, and so need targets of shape ({sizes[1]}), and they "
        f"are ({sizes[2]}{'' if ',' in sizes[2] else ','})"
    )
    if "," in sizes[2]:
        return f"{start}. Move the classes, as in loss=lambda output, target: loss_fn(output.transpose(1, 2), target)"
    return f"{start}. For one label for each sample, choose or average positions in the model, as in output[:, -1]"


def _explain_output_attribute(message: str) -> str | None:
    """Return the remedy where code takes ``output.loss`` of a dict or a tuple."""
    found = re.search(r"^'(dict|tuple|list|OrderedDict)' object has no attribute '(\w+)'", message)
    if found is None:
        return None
    if found[1] in ("tuple", "list"):
        return (
            f"This is a {found[1]}, whose parts have numbers: use output[0], or the right place, instead of .{found[2]}"
        )
    return f"This is a {found[1]}, whose values have names: use output[{found[2]!r}] instead of .{found[2]}"


def _explain_probabilities(message: str) -> str | None:
    """Return the remedy where nn.BCELoss gets numbers that are not probabilities."""
    if "all elements of input should be between 0 and 1" not in message:
        return None
    return (
        "nn.BCELoss needs probabilities, and some of the model's outputs are not between 0 and 1. Use "
        "nn.BCEWithLogitsLoss(), which applies the sigmoid itself, or end the model with nn.Sigmoid()"
    )


def _explain_target_type(message: str) -> str | None:
    """Return the remedy where targets are not numbers."""
    kind = re.search(r"argument 'target' \(position 2\) must be Tensor, not (\w+)", message)
    if kind is None:
        return None
    return (
        f"The targets of a batch are of type {kind[1]}, as texts are. Give numbers: for classes, as in "
        "numpy.unique(labels, return_inverse=True)[1]"
    )


def _explain_detached(message: str) -> str | None:
    if DETACHED_MESSAGE not in message:
        return None
    return (
        "The loss has no gradient, so it can't train the model. detach(), item(), numpy(), argmax() or torch.no_grad() "
        "cut it off from the parameters; compute it from the model's output by torch's functions alone"
    )


def _explain_swapped_loss(message: str) -> str | None:
    if not re.search(r"softmax\w*\"? not implemented for '(Long|Int|Short|Char|Byte)'", message):
        return None
    return (
        "The loss takes the softmax of whole numbers, which look like labels. dtkit calls loss(output, target) in this "
        "order, and torch's losses take both in the same order; swap them"
    )


def _explain_target(message: str, target: Any) -> str | None:
    targets = next(iterate_tensors(target), None)
    if targets is None:
        return None
    name = name_dtype(targets.dtype)
    if re.search(r"expected target dtype|scalar type Long but|nll_loss.* not implemented", message):
        return (
            f"The targets are {name}, and class labels must be int64; convert them, as in y.astype('int64'), or "
            "y.long() for a tensor"
        )
    if re.search(r"Found dtype Long but expected|can't be cast to the desired output type Long", message):
        return (
            f"The targets are {name}, and this loss expects floats; convert them, as in y.astype('float32'), or "
            "y.float() for a tensor"
        )
    if re.search(r"multi-target not supported|floating point type for target with class probabilities", message):
        if targets.dim() <= 1:
            return (
                f"The targets of a batch have shape {tuple(targets.shape)}, as class labels must, so the loss takes "
                "something else as its target. dtkit calls loss(output, target) in this order; are they swapped?"
            )
        remedy = "y[:, 0]" if targets.shape[1:] == (1,) else "y.argmax(1) for rows of 0 and 1"
        return (
            f"The targets of a batch have shape {tuple(targets.shape)}, and class labels must have shape "
            f"{tuple(targets.shape[:1])}, one number for each sample; convert them, as in {remedy}"
        )
    return None


def _explain_class_range(
    message: str, target: Any, model: torch.nn.Module, all_labels: torch.Tensor | None
) -> str | None:
    """Return the remedy where class labels don't fit the number of outputs."""
    targets, where = next(iterate_tensors(target), None), "of this batch "
    refused = re.search(r"Target (-?\d+) is out of bounds", message)
    if targets is None or refused is None:
        return None
    if all_labels is not None and all_labels.dtype == targets.dtype and all_labels.numel() <= _MAX_LABELS:
        targets, where = all_labels, ""
    labels = targets[targets != DEFAULT_IGNORE_INDEX]
    low, high = int(labels.min()), int(labels.max())
    sizes = [m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear)]
    outputs = f", and the model's last layer has {sizes[-1]} outputs" if sizes else ""
    remedy = f"Use nn.Linear(..., {high + 1}) or more as that layer"
    if low < 0:
        remedy = "Number the classes from 0; rows without a label can have -100, which cross entropy ignores"
    elif low >= 1 and sizes and high - low < sizes[-1]:
        lowest = "y.min() for all labels" if where else low  # a batch may lack the lowest one
        remedy = f"Number the classes from 0, as in y - {lowest}"
    elif not sizes:
        remedy = "Number the classes from 0, or give the model as many outputs"
    first = _describe_first_label(targets, int(refused[1]), sizes, "sample" if where else "row")
    return (
        f"The targets {where}lie between {low} and {high}{outputs}; labels must be 0 to the number of classes - "
        f"1{first}. {remedy}"
    )


def _describe_first_label(labels: torch.Tensor, refused: int, sizes: Sequence[int], noun: str) -> str:
    """Return the first row with a label that a loss refuses, as it has refused one; "" if there is none."""
    num_outputs = sizes[-1] if sizes and not 0 <= refused < sizes[-1] else None
    is_bad = labels == refused if num_outputs is None else (labels < 0) | (labels >= num_outputs)
    is_bad &= labels != DEFAULT_IGNORE_INDEX
    rows = is_bad.reshape(len(labels), -1).any(1).nonzero()
    if not len(rows):
        return ""
    row = int(rows[0])
    label = int(labels[row][is_bad[row]].reshape(-1)[0])
    return f", and {noun} {row} is the first with another one, {label}"


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested batch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from iterate_tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from iterate_tensors(entry)


def name_dtype(dtype: torch.dtype) -> str:
    """Return a dtype as users write it, such as "int64"."""
    return str(dtype).removeprefix("torch.")

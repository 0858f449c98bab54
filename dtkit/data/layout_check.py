"""The remedy for validation data that differ from the training's in shapes or types, where the model refuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.engine.bad_rows import list_tensors
from dtkit.engine.loss_hints import name_dtype

if TYPE_CHECKING:
    import torch


def describe_difference(training: Any, validation: Any) -> str | None:
    """Return how a batch of validation data differs from one of the training data; None if it doesn't."""
    ours = {(part, name): tensor for part, tensor, name in list_tensors(training)}
    theirs = {(part, name): tensor for part, tensor, name in list_tensors(validation)}
    if len(ours) != len(theirs):
        return f"training has {_count_arrays(len(ours))}, validation {len(theirs)}. Give both the same parts"
    for key in ours.keys() & theirs.keys():
        if (text := _describe_tensors(f"{key[1]}{key[0]}", ours[key], theirs[key])) is not None:
            return text
    return None


def _count_arrays(count: int) -> str:
    return "1 array" if count == 1 else f"{count} arrays"


def _describe_tensors(name: str, training: torch.Tensor, validation: torch.Tensor) -> str | None:
    shapes = tuple(training.shape[1:]), tuple(validation.shape[1:])
    if shapes[0] != shapes[1]:
        start = f"training has {name} of shape {_name_shape(shapes[0])}, validation {_name_shape(shapes[1])}"
        if all(len(shape) == 1 for shape in shapes):
            start = f"training has {shapes[0][0]} columns in the {name}, validation {shapes[1][0]}"
        return f"{start}. Prepare both in the same way"
    if training.dtype != validation.dtype:
        dtype = name_dtype(training.dtype)
        return (
            f"training has {name} of type {dtype}, validation {name_dtype(validation.dtype)}. Convert those of the "
            f"validation, as in array.astype({dtype!r}), or tensor.to(torch.{dtype})"
        )
    return None


def _name_shape(sample: tuple[int, ...]) -> str:
    return f"(rows{''.join(f', {size}' for size in sample) or ','})"

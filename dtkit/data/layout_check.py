"""The remedy for held-out data that differ from the training's in shapes or types, where the model refuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.engine.bad_rows import list_tensors
from dtkit.engine.loss_hints import name_dtype

if TYPE_CHECKING:
    import torch


def describe_difference(training: Any, held_out: Any, name: str) -> str | None:
    """Return how a batch of held-out data, called `name`, differs from one of the training data; None if it doesn't."""
    ours = {(part, name): tensor for part, tensor, name in list_tensors(training)}
    theirs = {(part, name): tensor for part, tensor, name in list_tensors(held_out)}
    if len(ours) != len(theirs):
        return f"training has {_count_arrays(len(ours))}, {name} {len(theirs)}. Give both the same parts"
    for key in ours.keys() & theirs.keys():
        if (text := _describe_tensors(f"{key[1]}{key[0]}", ours[key], theirs[key], name)) is not None:
            return text
    return None


def _count_arrays(count: int) -> str:
    return "1 array" if count == 1 else f"{count} arrays"


def _describe_tensors(part: str, training: torch.Tensor, held_out: torch.Tensor, name: str) -> str | None:
    shapes = tuple(training.shape[1:]), tuple(held_out.shape[1:])
    if shapes[0] != shapes[1]:
        start = f"training has {part} of shape {_name_shape(shapes[0])}, {name} {_name_shape(shapes[1])}"
        if all(len(shape) == 1 for shape in shapes):
            start = f"training has {shapes[0][0]} columns in the {part}, {name} {shapes[1][0]}"
        return f"{start}. Prepare both in the same way"
    if training.dtype != held_out.dtype:
        dtype = name_dtype(training.dtype)
        return (
            f"training has {part} of type {dtype}, {name} {name_dtype(held_out.dtype)}. Convert those of the "
            f"{name}, as in array.astype({dtype!r}), or tensor.to(torch.{dtype})"
        )
    return None


def _name_shape(sample: tuple[int, ...]) -> str:
    return f"(rows{''.join(f', {size}' for size in sample) or ','})"

"""Collation of samples from user code, by torch's default collation or the user's function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.data.columns import ColumnSelection


_IMAGE_REMEDY = (
    "The Dataset returns images of PIL; have it return tensors, by transform=torchvision.transforms.ToTensor() or "
    "torch.from_numpy(numpy.array(image))"
)


def collate_samples(samples: Sequence[Any], columns: ColumnSelection) -> Any:
    """Return a batch: a tuple, a dict, or any other result of the user's function."""
    collate = columns.collate_fn or _collate_by_default
    batch = collate(list(samples))
    if isinstance(batch, Mapping):  # such as Hugging Face's BatchEncoding
        batch = dict(batch)
    return columns.split_batch(tuple(batch) if isinstance(batch, list) else batch)


def _collate_by_default(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        if (shapes := _find_ragged_shapes(samples)) is None:
            error.add_note(_IMAGE_REMEDY if "PIL." in str(error) else _describe_samples(samples))
            raise
        raise ValueError(
            f"samples have tensors of different shapes ({shapes}), so they can't be stacked. Pad them to one length in "
            "the Dataset, or give collate_fn=, a function from a list of samples to a batch (for tokens, Hugging "
            "Face's DataCollatorWithPadding)"
        ) from error


def _describe_samples(samples: Sequence[Any]) -> str:
    """Return the types of the first sample, and of the first one that differs in number of parts, with the rule."""
    first = _name_parts(samples[0])
    other = next((k for k, sample in enumerate(samples) if len(_as_tuple(sample)) != len(_as_tuple(samples[0]))), None)
    differing = "" if other is None else f", and sample {other} is {_name_parts(samples[other])}"
    return (
        f"Sample 0 of the batch is {first}{differing}. Each must be a pair (inputs, target) of tensors, arrays or "
        "numbers, or a tuple or dict of as many of them; or give collate_fn=, a function from a list of samples to a "
        "batch"
    )


def _name_parts(sample: Any) -> str:
    """Return the type of a sample, with those of its parts."""
    if isinstance(sample, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in sample)})"
    return "None" if sample is None else f"of type {type(sample).__name__}"


def _find_ragged_shapes(samples: Sequence[Any]) -> str | None:
    """Return two shapes of the same entry of two samples that differ; None if all agree."""
    first = _list_shapes(samples[0])
    for k, sample in enumerate(samples[1:], 1):
        for name, shape in _list_shapes(sample).items():
            if name in first and first[name] != shape:
                return f"{first[name]} and {shape}, in samples 0 and {k} of the batch"
    return None


def _list_shapes(sample: Any) -> dict[Any, tuple[int, ...]]:
    entries = sample.items() if isinstance(sample, Mapping) else enumerate(_as_tuple(sample))
    return {name: _get_shape(value) for name, value in entries}


def _as_tuple(sample: Any) -> tuple[Any, ...]:
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)


def _get_shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        return (len(value),)
    return tuple(value.shape) if isinstance(value, torch.Tensor) or hasattr(value, "shape") else ()

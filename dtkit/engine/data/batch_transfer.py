"""Batches as text and tensors, so that a process group, which carries no pickled objects, can send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtkit._util.formatting import name_type

_TENSOR, _TUPLE, _LIST, _DICT = "tensor", "tuple", "list", "dict"
_PLAIN_TYPES = (str, int, float, bool, type(None))


def flatten_batch(batch: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return (structure as JSON values, tensors) of a nested batch. Raises TypeError for other values in it."""
    tensors: list[torch.Tensor] = []
    return _describe(batch, tensors), tensors


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {_DICT: [[_check_plain(key), _describe(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        kind = _TUPLE if isinstance(value, tuple) else _LIST
        return {kind: [_describe(item, tensors) for item in value]}
    return _check_plain(value)


def _check_plain(value: Any) -> Any:
    if type(value) in _PLAIN_TYPES:
        return value
    raise TypeError(
        f"a batch has {name_type(value)}, which can't be sent from the rank that loads it to the others. Return "
        "tensors, numbers and text, or tuples, lists and dicts of these, from the Dataset"
    )


def build_batch(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the batch from the results of :func:`flatten_batch`."""
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == _DICT:
        return {key: build_batch(item, tensors) for key, item in content}
    items = [build_batch(item, tensors) for item in content]
    return tuple(items) if kind == _TUPLE else items

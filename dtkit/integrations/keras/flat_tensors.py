"""Several tensors as one flat tensor of each type, so that a step passes few values between TensorFlow and torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class FlatLayout:
    """Shapes and types of variables, in the order in which flat tensors have them."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._places: dict[str, list[int]] = {}
        for k, variable in enumerate(variables):
            self._places.setdefault(str(variable.dtype), []).append(k)

    def join(self, tensors: Sequence[Any]) -> list[Any]:
        """Return TensorFlow's tensors as flat ones."""
        return [tf.concat([tf.reshape(tensors[k], [-1]) for k in places], 0) for places in self._places.values()]

    def join_torch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return torch's tensors as flat ones, which are copies."""
        return [torch.cat([tensors[k].detach().reshape(-1) for k in places]) for places in self._places.values()]

    def split(self, flat: Sequence[Any]) -> list[Any]:
        """Return TensorFlow's tensors from flat ones."""
        return self._split(flat, tf.split, tf.reshape)

    def split_torch(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return torch's tensors, which are views of the flat ones."""
        return self._split(flat, torch.split, torch.Tensor.view)

    def _split(self, flat: Sequence[Any], split: Any, reshape: Any) -> list[Any]:
        tensors: list[Any] = [None] * len(self._shapes)
        for places, whole in zip(self._places.values(), flat, strict=True):
            parts = split(whole, [math.prod(self._shapes[k]) for k in places])
            for k, part in zip(places, parts, strict=True):
                tensors[k] = reshape(part, self._shapes[k])
        return tensors

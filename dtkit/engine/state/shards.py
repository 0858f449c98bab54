"""A rank's part of a job's state as data, and the protocol of sources of state.

State is canonical: tensors have the model's own names and whole shapes, and each rank has a part of them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dtkit.checkpoint.index import intersect, merge_facts, shift_slices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MODEL_PREFIX = "model"
"""Prefix of the names of the model's parameters and buffers."""


@dataclasses.dataclass(frozen=True)
class TensorShard:
    """Part of a tensor, with the shape of the whole tensor and the part's offset in it.

    With `fused_blocks`, the whole tensor is that many equal blocks along dimension `fused_dim`. The part is then the
    same part of each block, concatenated.
    """

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    fused_blocks: int = 1
    fused_dim: int = 0

    def split_blocks(self) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """Return (offset in the whole tensor, shape, offset in `tensor`) of the part of each block."""
        start = (0,) * self.tensor.dim()
        if self.fused_blocks == 1:
            return [(self.offset, tuple(self.tensor.shape), start)]
        dim = self.fused_dim
        length, full_length = self.tensor.shape[dim] // self.fused_blocks, self.full_shape[dim] // self.fused_blocks
        size = (*self.tensor.shape[:dim], length, *self.tensor.shape[dim + 1 :])
        return [
            (_move(self.offset, dim, k * full_length), size, _move(start, dim, k * length))
            for k in range(self.fused_blocks)
        ]


def _move(offset: tuple[int, ...], dim: int, distance: int) -> tuple[int, ...]:
    return (*offset[:dim], offset[dim] + distance, *offset[dim + 1 :])


@dataclasses.dataclass(frozen=True)
class ShardedState:
    """State from one rank. `shards` may be in use unless they were copied; `facts` are merged over ranks."""

    shards: dict[str, TensorShard]
    facts: dict[str, Any]


class StateReader(Protocol):
    """Source of state: files, or memory."""

    facts: Mapping[str, Any]
    """Facts of all ranks, from :func:`dtkit.checkpoint.index.merge_facts`."""

    def get_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None if there is none of this name."""

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the part of a tensor with this offset and shape, on the CPU."""


class MemoryReader:
    """Reader of shards in memory, from one rank or from all."""

    def __init__(self, parts: Iterable[Mapping[str, TensorShard]], facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self._shards_by_name: dict[str, list[TensorShard]] = {}
        for part in parts:
            for name, shard in part.items():
                self._shards_by_name.setdefault(name, []).append(shard)

    def get_shape(self, name: str) -> tuple[int, ...] | None:
        """See :class:`StateReader`."""
        shards = self._shards_by_name.get(name)
        return None if shards is None else shards[0].full_shape

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """See :class:`StateReader`."""
        shards = self._shards_by_name[name]
        part = torch.empty(tuple(shape), dtype=shards[0].tensor.dtype)
        for shard in shards:
            for begin, size, start in shard.split_blocks():
                intersection = intersect(begin, size, offset, shape)
                if intersection is not None:
                    shard_slices, part_slices = intersection
                    part[part_slices] = shard.tensor[shift_slices(shard_slices, start)]
        return part

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor, without copying if one shard is all of it. Raises ValueError if a part is missing."""
        shards = self._shards_by_name[name]
        shape = shards[0].full_shape
        if tuple(shards[0].tensor.shape) == shape:
            return shards[0].tensor
        if sum(shard.tensor.numel() for shard in shards) != math.prod(shape):
            offsets = [shard.offset for shard in shards]
            raise ValueError(f"{name} came in parts at {offsets} of {shape}; one is missing or came twice")
        return self.read_slice(name, [0] * len(shape), shape)


def join_state_dict(parts: Sequence[ShardedState]) -> dict[str, Any]:
    """Return a model's state dict from the parts that all ranks captured of it."""
    facts = merge_facts([part.facts for part in parts])
    reader = MemoryReader([part.shards for part in parts], facts)
    names = dict.fromkeys(name for part in parts for name in part.shards)
    state: dict[str, Any] = {name.removeprefix(f"{MODEL_PREFIX}/"): reader.read_whole(name) for name in names}
    aliases = facts["aliases"].get(MODEL_PREFIX, {})
    return {**state, **{name: state[first] for name, first in aliases.items()}, **facts["extra"]}

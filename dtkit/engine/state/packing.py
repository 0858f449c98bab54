"""A rank's part of a job's state in one piece of memory, so that it can be sent, and kept, in one go.

Eight bytes (the length of the header), the header (JSON: the facts; of every tensor its type, the shape of the whole,
where in it the part begins, the shape of the part, of how many blocks of rows it is) and the tensors, each at a
multiple of 64 bytes. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING

import torch

from dtkit.checkpoint.safetensors_file import SAFETENSORS_NAMES, TORCH_DTYPES
from dtkit.engine.state.capture import ShardedState, TensorShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ALIGNMENT = 64
_HEADER_LENGTH = struct.Struct("<Q")


class PackedLayout:
    """How a part is to be packed: known before any memory is taken for it."""

    def __init__(self, state: ShardedState) -> None:
        """`captured` may be in use, and on a device: it is copied by `fill`."""
        self._shards = list(state.shards.values())
        told = [
            (
                name,
                SAFETENSORS_NAMES[s.tensor.dtype],
                list(s.full_shape),
                list(s.offset),
                list(s.tensor.shape),
                s.fused_blocks,
            )
            for name, s in state.shards.items()
        ]
        self._header = json.dumps({"facts": state.facts, "slabs": told}).encode()
        *_, self.nbytes = _compute_offsets(len(self._header), [slab.tensor.nbytes for slab in self._shards])
        """Of the whole."""

    def pack_into(self, buffer: torch.Tensor) -> None:
        """Copy all of it into a block of `nbytes` bytes on the CPU."""
        _write_bytes(buffer, 0, _HEADER_LENGTH.pack(len(self._header)) + self._header)
        begins = _compute_offsets(len(self._header), [slab.tensor.nbytes for slab in self._shards])
        for slab, begin in zip(self._shards, begins, strict=False):
            _view_tensor(buffer, begin, slab.tensor.dtype, slab.tensor.shape).copy_(slab.tensor)


def unpack_state(buffer: torch.Tensor) -> ShardedState:
    """What was packed. Its tensors lie in the block: they are not copied."""
    (length,) = _HEADER_LENGTH.unpack(buffer[: _HEADER_LENGTH.size].numpy().tobytes())
    said = json.loads(buffer[_HEADER_LENGTH.size : _HEADER_LENGTH.size + length].numpy().tobytes())
    sizes = [math.prod(size) * TORCH_DTYPES[dtype].itemsize for _, dtype, _, _, size, _ in said["slabs"]]
    slabs = {
        name: TensorShard(_view_tensor(buffer, begin, TORCH_DTYPES[dtype], size), tuple(shape), tuple(offset), folds)
        for (name, dtype, shape, offset, size, folds), begin in zip(
            said["slabs"], _compute_offsets(length, sizes), strict=False
        )
    }
    return ShardedState(slabs, said["facts"])


def _compute_offsets(header_length: int, sizes: Sequence[int]) -> Iterator[int]:
    """Where each tensor begins, and last where all end."""
    end = _align(_HEADER_LENGTH.size + header_length)
    for size in sizes:
        yield end
        end = _align(end + size)
    yield end


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _write_bytes(buffer: torch.Tensor, offset: int, data: bytes) -> None:
    buffer[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _view_tensor(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

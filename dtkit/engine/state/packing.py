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

from dtkit.engine.state.capture import Captured, Slab
from dtkit.engine.state.safetensors_file import DTYPES, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ALIGNED = 64
_LENGTH = struct.Struct("<Q")


class Packing:
    """How a part is to be packed: known before any memory is taken for it."""

    def __init__(self, captured: Captured) -> None:
        """`captured` may be in use, and on a device: it is copied by `fill`."""
        self._slabs = list(captured.slabs.values())
        told = [
            (name, DTYPES[s.tensor.dtype], list(s.shape), list(s.offset), list(s.tensor.shape), s.folds)
            for name, s in captured.slabs.items()
        ]
        self._header = json.dumps({"facts": captured.facts, "slabs": told}).encode()
        *_, self.nbytes = _bounds(len(self._header), [slab.tensor.nbytes for slab in self._slabs])
        """Of the whole."""

    def fill(self, block: torch.Tensor) -> None:
        """Copy all of it into a block of `nbytes` bytes on the CPU."""
        _put(block, 0, _LENGTH.pack(len(self._header)) + self._header)
        begins = _bounds(len(self._header), [slab.tensor.nbytes for slab in self._slabs])
        for slab, begin in zip(self._slabs, begins, strict=False):
            _view(block, begin, slab.tensor.dtype, slab.tensor.shape).copy_(slab.tensor)


def unpack(block: torch.Tensor) -> Captured:
    """What was packed. Its tensors lie in the block: they are not copied."""
    (length,) = _LENGTH.unpack(block[: _LENGTH.size].numpy().tobytes())
    said = json.loads(block[_LENGTH.size : _LENGTH.size + length].numpy().tobytes())
    sizes = [math.prod(size) * NAMES[dtype].itemsize for _, dtype, _, _, size, _ in said["slabs"]]
    slabs = {
        name: Slab(_view(block, begin, NAMES[dtype], size), tuple(shape), tuple(offset), folds)
        for (name, dtype, shape, offset, size, folds), begin in zip(said["slabs"], _bounds(length, sizes), strict=False)
    }
    return Captured(slabs, said["facts"])


def _bounds(header: int, sizes: Sequence[int]) -> Iterator[int]:
    """Where each tensor begins, and last where all end."""
    end = _aligned(_LENGTH.size + header)
    for size in sizes:
        yield end
        end = _aligned(end + size)
    yield end


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED


def _put(block: torch.Tensor, begin: int, data: bytes) -> None:
    block[begin : begin + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _view(block: torch.Tensor, begin: int, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
    return block[begin : begin + math.prod(size) * dtype.itemsize].view(dtype).view(tuple(size))

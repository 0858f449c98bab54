"""A rank's part of a job's state in one block of memory, in the safetensors format, to be sent at once.

``safetensors.torch.save`` returns such a block too, but it copies all tensors twice, and allocates memory without a
check. Here each tensor is copied once, from any device and with any strides, into a block of known size. The format has
no complex128 and no sparse tensors: :class:`~dtkit.engine.state.capture.StateCapture` refuses these.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from dtkit.checkpoint.safetensors_file import TORCH_DTYPES, encode_header
from dtkit.engine.state.shards import ShardedState, TensorShard

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTH_BYTES = 8  # the header's length precedes it


class PackedLayout:
    """Layout of a packed state, known before any memory is allocated for it."""

    def __init__(self, state: ShardedState) -> None:
        """The state may be in use, and on a device: `pack_into` copies it."""
        positions = {name: (s.full_shape, s.offset, s.fused_blocks, s.fused_dim) for name, s in state.shards.items()}
        tensors = {name: shard.tensor for name, shard in state.shards.items()}
        # Tensors with large elements come first, so that all are aligned without gaps, which the format forbids.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        self._tensors = list(tensors.values())
        metadata = {"facts": json.dumps(state.facts), "positions": json.dumps(positions)}
        self._header = encode_header(tensors, metadata)
        self.nbytes = len(self._header) + sum(tensor.nbytes for tensor in self._tensors)
        """Size of the block."""

    def pack_into(self, block: torch.Tensor) -> None:
        """Copy the state into a block of `nbytes` bytes on the CPU."""
        begin = len(self._header)
        block[:begin] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        for tensor in self._tensors:
            end = begin + tensor.nbytes
            _view_tensor(block[begin:end], tensor.dtype, tensor.shape).copy_(tensor)
            begin = end


def unpack_state(block: torch.Tensor) -> ShardedState:
    """Return the state in a block. Its tensors are views of the block."""
    data_begin = _LENGTH_BYTES + int.from_bytes(block[:_LENGTH_BYTES].numpy().tobytes(), "little")
    header = json.loads(block[_LENGTH_BYTES:data_begin].numpy().tobytes())
    metadata, data = header["__metadata__"], block[data_begin:]
    shards = {}
    for name, (full_shape, offset, *blocks) in json.loads(metadata["positions"]).items():
        entry = header[name]
        tensor = _view_tensor(data[slice(*entry["data_offsets"])], TORCH_DTYPES[entry["dtype"]], entry["shape"])
        shards[name] = TensorShard(tensor, tuple(full_shape), tuple(offset), *blocks)
    return ShardedState(shards, json.loads(metadata["facts"]))


def _view_tensor(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return data.view(dtype).view(tuple(shape))

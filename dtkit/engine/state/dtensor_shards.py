"""A rank's part of a DTensor: its position, and functions to make and move it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from dtkit._util.dtensor import is_dtensor
from dtkit._util.torch_private import AsyncCollectiveTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor without copying; a plain tensor as it is."""
    with torch.no_grad():
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        # waits: a collective, limited by the process group's timeout
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def get_shard_position(tensor: DTensor) -> tuple[int, int] | None:
    """Return (the sharded dimension, the index of this rank's part), or None for a whole tensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            return placement.dim, coordinate[axis]  # type: ignore[attr-defined]  # Shard has a dim
    return None


def count_shards(tensor: torch.Tensor) -> int:
    """Return the number of parts of a tensor."""
    if not is_dtensor(tensor):
        return 1
    cuts = [n for n, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if placement.is_shard()]
    return cuts[0] if cuts else 1


def get_num_fused_blocks(parameter: torch.Tensor) -> int:
    """Return the number of matrices in one parameter, such as 3 for queries, keys and values. Each is sharded."""
    num_blocks: int = getattr(parameter, _FUSED_BLOCKS_ATTRIBUTE, 1)
    return num_blocks


def set_num_fused_blocks(parameter: nn.Parameter, num_blocks: int) -> nn.Parameter:
    """Store the number of blocks of a parameter, along the dimension in which it is sharded."""
    setattr(parameter, _FUSED_BLOCKS_ATTRIBUTE, num_blocks)
    return parameter


_FUSED_BLOCKS_ATTRIBUTE = "dtkit_fused_blocks"


def slice_like(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of a tensor if it is sharded like another: a torch.chunk, or an empty tensor."""
    position = get_shard_position(like)
    if position is None:
        return whole
    (dim, index), num_shards, num_blocks = position, count_shards(like), get_num_fused_blocks(like)
    if num_blocks > 1:
        return torch.cat([block.chunk(num_shards, dim)[index] for block in whole.chunk(num_blocks, dim)], dim)
    chunks = whole.chunk(num_shards, dim)
    return chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)


def wrap_local_shard(local_shard: torch.Tensor, like: DTensor) -> DTensor:
    """Return the DTensor of which this is the local part, sharded like another."""
    from torch.distributed.tensor import DTensor

    mesh, stride = like.device_mesh, like.stride()
    return DTensor.from_local(local_shard, mesh, like.placements, run_check=False, shape=like.shape, stride=stride)


@torch.no_grad()
def move_to_mesh_of(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """Return a tensor with the same local part on another mesh."""
    from torch.distributed.tensor import DTensor

    placements = tensor.placements if is_dtensor(tensor) else like.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(
        get_local_tensor(tensor), like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )

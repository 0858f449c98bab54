"""A rank's part of a DTensor: where it lies, and how it is made and moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:


    pass


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What lies here of a tensor, without copying; the tensor itself where it is no DTensor."""
    with torch.no_grad():
        found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # waits: a collective, limited by the process group's timeout
        return found.wait() if isinstance(found, AsyncCollectiveTensor) else found


def get_shard_position(tensor: DTensor) -> tuple[int, int] | None:
    """(the dimension along which it is cut, the how-manieth part lies here); None where all of it does."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            return placement.dim, coordinate[axis]  # type: ignore[attr-defined]  # Shard has a dim
    return None


def count_shards(tensor: torch.Tensor) -> int:
    """Into how many parts a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    cuts = [n for n, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if placement.is_shard()]
    return cuts[0] if cuts else 1


def get_num_fused_blocks(parameter: torch.Tensor) -> int:
    """Of how many equal blocks of rows a rank has its part each: 3 where queries, keys and values are one parameter."""
    found: int = getattr(parameter, _FUSED_BLOCKS_ATTRIBUTE, 1)
    return found


def set_num_fused_blocks(parameter: nn.Parameter, num_blocks: int) -> nn.Parameter:
    """Say of how many blocks of rows a parameter, cut by rows, has a part each."""
    setattr(parameter, _FUSED_BLOCKS_ATTRIBUTE, num_blocks)
    return parameter


_FUSED_BLOCKS_ATTRIBUTE = "dtkit_folds"


def slice_like(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a tensor that is to be cut like another: parts as torch.chunk makes them, or none."""
    cut = get_shard_position(like)
    if cut is None:
        return whole
    if get_num_fused_blocks(like) > 1:
        return torch.cat([block.chunk(count_shards(like))[cut[1]] for block in whole.chunk(get_num_fused_blocks(like))])
    chunks = whole.chunk(count_shards(like), cut[0])
    return chunks[cut[1]] if cut[1] < len(chunks) else whole.narrow(cut[0], 0, 0)


def wrap_local_shard(local_shard: torch.Tensor, like: DTensor) -> DTensor:
    """The tensor of which this is what lies here, laid out as another is."""
    mesh, stride = like.device_mesh, like.stride()
    return DTensor.from_local(local_shard, mesh, like.placements, run_check=False, shape=like.shape, stride=stride)


@torch.no_grad()
def move_to_mesh_of(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """The same numbers on another mesh."""
    placements = tensor.placements if isinstance(tensor, DTensor) else like.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(
        get_local_tensor(tensor), like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


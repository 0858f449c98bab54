"""Removal of torch's references to closed process groups, which keep threads and connections alive.

Python's garbage collector doesn't break these references. Each costs three threads, and a connection to every peer:

- Some functions have the default argument ``group=dist.group.WORLD``: the group at the time of the module's import.
  They would also use that group forever. None means the current group instead.
- A DeviceMesh has a table of the groups along its axes, and the keys of DTensor's caches include every mesh. These
  entries are useless, since no mesh equals one of an earlier generation.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dtkit._util import torch_private
from dtkit._util.torch_private import get_mesh_groups, world_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

_MODULES_WITH_GROUP_DEFAULTS = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
_CACHE_CLEARS = (
    "clear_sharding_cache",
    "clear_propagation_cache",
    "clear_transform_cache",
    "clear_planner_cache",
    "clear_topology_cache",
)
"""Functions in `torch_private` that clear a cache, or None if torch has no such cache."""


def reset_group_names() -> None:
    """Let the next group of all ranks have torch's first name, as in a new process.

    torch numbers groups, and also counts one that could not be formed. Ranks with different numbers never connect.
    """
    if not dist.is_initialized():
        world_state.group_count = 0


def release_groups(device_meshes: Iterable[DeviceMesh]) -> None:
    """Remove torch's references to the closed process group of these `device_meshes`."""
    for function in _iterate_functions():
        if any(isinstance(default, dist.ProcessGroup) for default in function.__defaults__ or ()):
            function.__defaults__ = tuple(map(_drop_group, function.__defaults__ or ()))
    for device_mesh in device_meshes:
        if get_mesh_groups is not None:
            get_mesh_groups(device_mesh).clear()
    if "torch.distributed.tensor" in sys.modules:
        for clear in [getattr(torch_private, name) for name in _CACHE_CLEARS]:
            if clear is not None:
                clear()


def _iterate_functions() -> Iterator[types.FunctionType]:
    """Yield the functions and methods of the loaded modules in which a default argument may be a group."""
    for name in _MODULES_WITH_GROUP_DEFAULTS:
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            members = vars(value).values() if isinstance(value, type) else (value,)
            yield from (member for member in members if isinstance(member, types.FunctionType))


def _drop_group(default: Any) -> Any:
    return None if isinstance(default, dist.ProcessGroup) else default

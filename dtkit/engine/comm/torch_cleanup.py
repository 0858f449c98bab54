"""What torch keeps of a process group that was left: its threads and connections live as long as anybody holds it.

Python's collector of cycles sees none of these holders. Seen in torch 2.13, where each costs three threads and a
connection to every peer:

- A few functions have ``group=dist.group.WORLD`` for a default: the group that there was as their module was loaded.
  They would use that one for ever, too. None in its place is whichever group there is.
- A DeviceMesh has a table of the groups along its axes, and DTensor's caches have every mesh that there ever was among
  their keys. They are of no use: no mesh of a later generation equals one of an earlier.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

_MODULES_WITH_GROUP_DEFAULTS = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
_DTENSOR_CACHES = (
    ("torch._C", "_clear_DTensor_sharding_propagator_cache"),
    ("torch.distributed.tensor", "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)
"""Private names, each of which a version of torch may lack. The meshes in its cache then hold no group at least."""


def release_groups(device_meshes: Iterable[DeviceMesh]) -> None:
    """Have torch hold no group any more, after the last one was left; `grids` are the meshes made over it."""
    for function in _iterate_functions():
        if any(isinstance(default, dist.ProcessGroup) for default in function.__defaults__ or ()):
            function.__defaults__ = tuple(map(_drop_group, function.__defaults__ or ()))
    for grid in device_meshes:
        getattr(grid, "_pg_registry", {}).clear()
    if "torch.distributed.tensor" in sys.modules:
        for module, path in _DTENSOR_CACHES:
            _find_cache_clear(module, path)()


def _iterate_functions() -> Iterator[types.FunctionType]:
    """Functions and methods of the modules whose defaults are groups, where they are loaded."""
    for name in _MODULES_WITH_GROUP_DEFAULTS:
        for thing in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            inside = vars(thing).values() if isinstance(thing, type) else (thing,)
            yield from (found for found in inside if isinstance(found, types.FunctionType))


def _drop_group(default: Any) -> Any:
    return None if isinstance(default, dist.ProcessGroup) else default


def _find_cache_clear(module: str, path: str) -> Callable[[], Any]:
    """A function of a module by its dotted path; one that does nothing where there is none."""
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return _do_nothing if found is None else found


def _do_nothing() -> None:
    """What there is to clear where there is no cache."""

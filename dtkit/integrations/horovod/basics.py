"""Start and end, ranks and sizes, and what this implementation can do."""

from __future__ import annotations

import atexit
import os
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit.integrations import timeouts
from dtkit.integrations.horovod.communicator import Communicator
from dtkit.integrations.horovod.context import Context, Placement, get_context, has_context, set_context
from dtkit.integrations.horovod.exceptions import MeetingError
from dtkit.integrations.horovod.own_group import OwnGroup
from dtkit.integrations.horovod.process_sets import ProcessSet, add_process_set

if TYPE_CHECKING:
    from collections.abc import Sequence

_own_group = OwnGroup()
_MAX_ATTEMPTS = 5


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Initialize: use the current process group, or form one from torchrun's environment. A collective.

    comm : None, or the list of all ranks.
    process_sets : sets to register, or "dynamic", which changes nothing: sets can always be added and removed.
    """
    if has_context():
        return
    if not dist.is_initialized() and _own_group.joins_running_script():
        join_again(comm, process_sets)
    else:
        _start(comm, process_sets)


def join_again(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Leave a group that has failed, and form it again: several times if ranks are lost meanwhile.

    Each attempt has the same limit on all ranks, so none waits for long in a group that others have given up.
    """
    for remaining in reversed(range(_MAX_ATTEMPTS)):
        leave_failed_group()
        try:
            _start(comm, process_sets, timeouts.HOROVOD_RESET_TIMEOUT_S)
        except MeetingError:
            raise
        except RuntimeError:
            if not remaining:
                raise
        else:
            return


def _start(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Initialize, with a limit for the ranks to connect."""
    if not dist.is_initialized():
        _own_group.form(timeout_s)
    _check_comm(comm)
    set_context(Context(_find_placement(), _get_backend(), _own_group.is_superseded))
    _own_group.raise_limit()
    for process_set in process_sets if process_sets is not None and not isinstance(process_sets, str) else ():
        process_set.process_set_id = None
        add_process_set(process_set)


def _check_comm(comm: Any) -> None:
    if comm is not None and (
        not isinstance(comm, list) or sorted(comm) not in ([], list(range(dist.get_world_size())))
    ):
        raise NotImplementedError(
            "comm can't be an MPI communicator or a part of the ranks; use hvd.ProcessSet instead"
        )


def _get_backend() -> str:
    """Return the backend for subgroups. torch describes the main group's backend as a map."""
    backend = str(dist.get_backend())
    return "cpu:gloo,cuda:nccl" if "nccl" in backend or backend == "undefined" else backend


def _find_placement() -> Placement:
    """Return the placement from torchrun's environment if it is complete, else by comparing the hosts' names."""
    world = Communicator(range(dist.get_world_size()), dist.get_rank(), None, str(dist.get_backend()))
    hosts = world.all_gather_json(socket.gethostname())
    names = list(dict.fromkeys(hosts))
    sizes = [hosts.count(name) for name in names]
    host = hosts[world.index]
    local_rank = hosts[: world.index].count(host)
    placement = Placement(
        local_rank=local_rank,
        local_size=hosts.count(host),
        cross_rank=[name for name, size in zip(names, sizes, strict=True) if size > local_rank].index(host),
        cross_size=sum(size > local_rank for size in sizes),
        is_homogeneous=len(set(sizes)) == 1,
    )
    if _own_group.break_connections is not None and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        placement.local_rank = int(os.environ["LOCAL_RANK"])
        placement.local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        placement.cross_rank = int(os.environ.get("GROUP_RANK", placement.cross_rank))
        placement.cross_size = int(os.environ.get("GROUP_WORLD_SIZE", placement.cross_size))
    return placement


def shutdown() -> None:
    """Undo `init`. A process group that existed before it stays."""
    _end_context(has_failed=False)


def leave_failed_group() -> None:
    """Undo `init` after a failed collective, and end the wait of ranks that haven't noticed the failure."""
    _end_context(has_failed=True)


def _end_context(*, has_failed: bool) -> None:
    if not has_context() and not has_failed:
        set_context(None)
        return
    are_idle = not has_context() or get_context().close()
    set_context(None)
    _own_group.leave(has_failed=has_failed or not are_idle)


atexit.register(shutdown)


def can_restart() -> bool:
    """Return whether `init` formed the process group, and so can form it again."""
    return _own_group.break_connections is not None


def is_initialized() -> bool:
    """Return whether `init` was called, in the current process group."""
    return has_context()


def rank() -> int:
    """Return this process's rank, from 0."""
    return get_context().rank


def size() -> int:
    """Return the number of ranks."""
    return get_context().size


def local_rank() -> int:
    """Return this process's rank among those of its host."""
    return get_context().placement.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return get_context().placement.local_size


def cross_rank() -> int:
    """Return this host's number among the hosts that have a rank with this local rank."""
    return get_context().placement.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return get_context().placement.cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have equally many ranks."""
    return get_context().placement.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise NotImplementedError: there is no timeline of operations."""
    raise NotImplementedError("timelines are not supported; profile with torch.profiler instead")


def stop_timeline() -> None:
    """Raise NotImplementedError: there is no timeline of operations."""
    raise NotImplementedError("timelines are not supported; profile with torch.profiler instead")


def mpi_threads_supported() -> bool:
    """Raise NotImplementedError: there is no MPI."""
    raise NotImplementedError("MPI is not supported; operations use gloo and NCCL")


def mpi_enabled() -> bool:
    """Return False: there is no MPI."""
    return False


def mpi_built() -> bool:
    """Return False: there is no MPI."""
    return False


def gloo_enabled() -> bool:
    """Return True: tensors in host memory use gloo."""
    return True


def gloo_built() -> bool:
    """Return True: torch has gloo."""
    return True


def nccl_built() -> int:
    """Return NCCL's version as one number, such as 22706, or 0 without a GPU."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """Return False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL."""
    return False


def cuda_built() -> bool:
    """Return whether torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch has ROCm."""
    return torch.version.hip is not None

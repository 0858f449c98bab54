"""Environment variables of ranks, and the store of scripts that form a process group themselves, as under torchrun."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.messages import GroupSpec


def open_store(world_size: int) -> tuple[Any, int]:
    """Return a TCPStore on loopback, which ends with its last reference, and its port."""
    import torch.distributed as dist

    # port: bound to loopback for as long as the script runs
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    # port: bound to loopback for as long as the script runs
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it by name only
        "127.0.0.1",
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


@contextlib.contextmanager
def set_environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def make_rank_environment(spec: GroupSpec) -> dict[str, str]:
    """Return the variables from which libraries such as Lightning and Accelerate read this process's rank.

    Without a GPU, Accelerate takes each rank for a process of its own, and the ranks would train apart in silence.
    ``accelerate launch --cpu`` therefore sets ACCELERATE_USE_CPU, which Hugging Face's Trainer reads as well.
    """
    rank = str(spec.rank)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(spec.world_size)}
    if spec.device == "cpu":
        names["ACCELERATE_USE_CPU"] = os.environ.get("ACCELERATE_USE_CPU", "true")
    return names


def make_torchrun_environment(spec: GroupSpec, port: int, restart_count: int) -> dict[str, str]:
    """Return a worker's environment under torchrun (torch.distributed.run, "Environment Variables")."""
    rank, world = str(spec.rank), str(spec.world_size)
    return make_rank_environment(spec) | {
        "ROLE_RANK": rank,
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "dtkit",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": os.devnull,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(spec.threads or 1)),
    }

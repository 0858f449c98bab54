"""The process group that `init` forms in a script without one, and forms again after a failure.

Under ``cluster.torchrun`` on one host, ranks come from a :class:`~dtkit.rpc.script_ranks.ScriptFolder`. They may change
while a rank waits for the others, which then starts over with the new ones. Elsewhere, torchrun's environment names the
ranks.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit._util import timeouts
from dtkit._util.torch_private import set_group_timeout
from dtkit.engine.comm.tcp import make_connection_breaker
from dtkit.engine.comm.torch_cleanup import reset_group_names
from dtkit.errors import format_ranks
from dtkit.integrations import timeouts as integration_timeouts
from dtkit.integrations.horovod.exceptions import MeetingError
from dtkit.rpc.script_ranks import FOLDER_VARIABLE, SLOT_VARIABLE, ScriptFolder, ScriptRanks

if TYPE_CHECKING:
    from collections.abc import Callable

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GENERATION = "dtkit-horovod/generation"


class OwnGroup:
    """The process group that `init` formed in a script without one."""

    def __init__(self) -> None:
        self._stores: dict[int, Any] = {}  # by version of the ranks; kept because rank 0 may serve the store
        self._has_newer: Callable[[], bool] = lambda: False
        self.break_connections: Callable[[], None] | None = None
        """Ends blocked collectives; None if no group is formed."""

    def form(self, timeout_s: float | None) -> None:
        """Form a group of the script's ranks; without torchrun's environment, of this process alone."""
        limit_s = timeouts.FIRST_STEP_TIMEOUT_S if timeout_s is None else timeout_s
        store, rank, size = self._find_store(dt.timedelta(seconds=limit_s))
        self.break_connections = make_connection_breaker()
        reset_group_names()
        dist.init_process_group(
            _choose_backend(), store=store, rank=rank, world_size=size, timeout=dt.timedelta(seconds=limit_s)
        )

    def raise_limit(self) -> None:
        """Let collectives take as long as those after the first start: a rank may compute for long."""
        if self.break_connections is not None and set_group_timeout is not None:
            set_group_timeout(dt.timedelta(seconds=timeouts.FIRST_STEP_TIMEOUT_S), dist.group.WORLD)

    def joins_running_script(self) -> bool:
        """Return whether this process was started again, or leaves a group that has failed.

        The other ranks then wait for it under `elastic.run`. All arrive before the group is formed.
        """
        path = os.environ.get(FOLDER_VARIABLE)
        return path is not None and ScriptFolder(Path(path)).elastic_file.exists()

    def is_superseded(self) -> bool:
        """Return whether ranks form a newer group, since one was lost or started again."""
        try:
            return self._has_newer()
        except (OSError, RuntimeError):  # the script has ended, or the store's rank
            return False

    def leave(self, *, has_failed: bool) -> None:
        """End the group. If it has failed, end the collectives that still run, here and on other ranks.

        torch closes a group's connections with its last reference, and an exception's traceback may hold one. So other
        ranks could wait for this one for as long as the group's timeout.
        """
        if self.break_connections is None:
            return
        if has_failed:
            self.break_connections()
        self.break_connections = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _find_store(self, limit: dt.timedelta) -> tuple[Any, int, int]:
        """Return the store of the next group, this process's rank and the number of ranks."""
        if path := os.environ.get(FOLDER_VARIABLE):
            return self._meet(ScriptFolder(Path(path)), int(os.environ[SLOT_VARIABLE]))
        if 0 not in self._stores:
            self._stores[0] = _open_store(limit)
        store, rank, size = self._stores[0]
        generation = _find_generation(store, rank)
        self._has_newer = lambda: not _is_latest(store, generation)
        return _scope(store, generation), rank, size

    def _meet(self, folder: ScriptFolder, slot: int) -> tuple[Any, int, int]:
        """Wait until all ranks have arrived; return as `_find_store` does."""
        deadline = time.monotonic() + integration_timeouts.HOROVOD_MEETING_TIMEOUT_S
        pause = threading.Event()
        while True:
            ranks = folder.read()
            rank, size = ranks.find_rank(slot), len(ranks.slots)
            if rank is None:
                raise MeetingError(f"the script goes on without this process, whose engine had been rank {slot}")
            store = self._open_file_store(folder, ranks)
            generation = _find_generation(store, rank)
            keys = [f"{_GENERATION}/{generation}/{other}" for other in range(size)]
            self._has_newer = functools.partial(_has_newer, folder, ranks.version, store, generation)
            while not self._has_newer():
                if store.check(keys):
                    os.environ.update(ranks.make_environment(slot))
                    return _scope(store, generation), rank, size
                _check_none_ended(folder, ranks)
                if time.monotonic() > deadline:
                    raise MeetingError(
                        f"not all of {size} ranks came within {integration_timeouts.HOROVOD_MEETING_TIMEOUT_S:.0f} s; "
                        "end the script by an interrupt, and start it again"
                    )
                pause.wait(timeouts.PROCESS_POLL_S)

    def _open_file_store(self, folder: ScriptFolder, ranks: ScriptRanks) -> Any:
        if ranks.version not in self._stores:
            path = str(folder.get_store(ranks.version))
            self._stores[ranks.version] = dist.FileStore(path)  # type: ignore[attr-defined]  # torch exports it by name only
        return self._stores[ranks.version]


def _check_none_ended(folder: ScriptFolder, ranks: ScriptRanks) -> None:
    if ended := folder.find_ended(ranks):
        raise MeetingError(
            f"this rank can't form a group, since {format_ranks(ended)} ended the script before. It was started again, "
            "or lost its connections, too late to go on; run the script again"
        )


def _scope(store: Any, generation: int) -> Any:
    return dist.PrefixStore(f"dtkit-horovod/{generation}", store)  # type: ignore[attr-defined]  # as above


def _find_generation(store: Any, rank: int) -> int:
    """Return the number of the group that the ranks form next, and note that this rank has arrived.

    A group has ended if this rank was in it, in this process or in an earlier one that was killed.
    """
    current = int(store.compare_set(_GENERATION, "", "0"))
    if store.check([f"{_GENERATION}/{current}/{rank}"]):
        store.compare_set(_GENERATION, str(current), str(current + 1))  # another rank may have been first
        current = int(store.get(_GENERATION))
    store.set(f"{_GENERATION}/{current}/{rank}", "1")
    return current


def _is_latest(store: Any, generation: int) -> bool:
    """Return whether this is the latest group. A restarted rank begins another one."""
    return int(store.get(_GENERATION)) == generation


def _has_newer(folder: ScriptFolder, version: int, store: Any, generation: int) -> bool:
    return folder.read().version != version or not _is_latest(store, generation)


def _open_store(limit: dt.timedelta) -> tuple[Any, int, int]:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if "WORLD_SIZE" not in os.environ or missing == [*_TORCHRUN_VARIABLES[2:]]:
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]  # as above
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not set; start the script with cluster.torchrun(script, horovod=True) "
            "or python -m torch.distributed.run"
        )
    store, rank, size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]  # as above
    return store, rank, size


def _choose_backend() -> str:
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_device_each = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    return "cpu:gloo,cuda:nccl" if has_device_each and dist.is_nccl_available() else "gloo"

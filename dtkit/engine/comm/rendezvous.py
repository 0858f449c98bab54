"""Meeting of a generation's ranks before torch connects them, by files on one host, or by a store between several."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dtkit._util import timeouts
from dtkit.engine.comm.host_store import HostStore
from dtkit.messages import ABORT_FLAG

if TYPE_CHECKING:
    from dtkit.messages import GroupSpec


def meet(spec: GroupSpec) -> Any:
    """Wait until all ranks have arrived, and return the store at which torch connects them.

    Unlike torch's wait, an interrupt or the abort flag ends this one.
    """
    if spec.store is None:
        _wait_for_ranks(spec, _FileArrivals(spec))
        store: Any = dist.FileStore(spec.store_path, spec.world_size)  # type: ignore[attr-defined]  # torch exports it by name only
    else:
        store = HostStore(spec.store, spec.timeout_s)
        try:
            _wait_for_ranks(spec, _StoreArrivals(store))
        except BaseException:
            store.close()
            raise
    store.set_timeout(dt.timedelta(seconds=spec.timeout_s))  # also for subgroups, instead of five minutes
    return store


class _FileArrivals:
    """Ranks that have arrived, as files next to the store."""

    poll_s = timeouts.GROUP_JOIN_POLL_S

    def __init__(self, spec: GroupSpec) -> None:
        self._path = spec.store_path

    def add(self, rank: int) -> None:
        Path(f"{self._path}.{rank}").touch(mode=0o600)

    def remove(self, rank: int) -> None:
        Path(f"{self._path}.{rank}").unlink(missing_ok=True)

    def has(self, rank: int) -> bool:
        return Path(f"{self._path}.{rank}").exists()


class _StoreArrivals:
    """Ranks that have arrived, as values of a store between hosts."""

    poll_s = timeouts.STORE_POLL_S

    def __init__(self, store: HostStore) -> None:
        self._store = store

    def add(self, rank: int) -> None:
        self._store.set(f"arrived-{rank}", b"1")

    def remove(self, rank: int) -> None:
        self._store.delete_key(f"arrived-{rank}")

    def has(self, rank: int) -> bool:
        return self._store.check([f"arrived-{rank}"])


def _wait_for_ranks(spec: GroupSpec, arrivals: _FileArrivals | _StoreArrivals) -> None:
    arrivals.add(spec.rank)
    try:
        _poll_for_ranks(spec, arrivals)
    except BaseException:
        with contextlib.suppress(OSError):
            arrivals.remove(spec.rank)  # else later ranks would wait for this one in torch
        raise


def _poll_for_ranks(spec: GroupSpec, arrivals: _FileArrivals | _StoreArrivals) -> None:
    abort_flag = Path(f"{spec.store_path}{ABORT_FLAG}")
    deadline, pause = time.monotonic() + spec.timeout_s, threading.Event()
    missing = list(range(spec.world_size))
    while missing := [rank for rank in missing if not arrivals.has(rank)]:
        _check_not_aborted(spec, abort_flag)
        if time.monotonic() > deadline:
            raise RuntimeError(f"Wait timeout: ranks {missing} did not join the group within {spec.timeout_s:g} s")
        pause.wait(arrivals.poll_s)
    _check_not_aborted(spec, abort_flag)  # the last rank hasn't checked yet, and others may have left


def _check_not_aborted(spec: GroupSpec, abort_flag: Path) -> None:
    if abort_flag.exists():
        raise RuntimeError(f"Connection closed: a rank could not join generation {spec.generation} of the group")

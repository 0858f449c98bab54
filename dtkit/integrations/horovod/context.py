"""State that `init` creates and the other functions use: this rank, and a worker for each process set."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dtkit._util.torch_private import get_default_store
from dtkit.integrations.horovod.communicator import Communicator
from dtkit.integrations.horovod.exceptions import HorovodInternalError, NotInitializedError
from dtkit.integrations.horovod.joining import JoinBoard
from dtkit.integrations.horovod.negotiation import NegotiatingWorker
from dtkit.integrations.horovod.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHECK_VARIABLE = "HOROVOD_CHECK"
"""Environment variable that switches the strict mode on."""


@dataclasses.dataclass
class Placement:
    """Place of this rank among the ranks of its host, and of its host among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool = True
    """Whether all hosts have equally many ranks."""


class Context:
    """One initialization. It ends with the process group in which it was made."""

    def __init__(self, placement: Placement, backend: str, is_superseded: Callable[[], bool]) -> None:
        """`is_superseded` tells whether other ranks form a newer group, after the loss of one."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._is_superseded = is_superseded
        self.placement = placement
        self._backend = backend
        self.sync_root = 0
        """Rank whose state `elastic.run` copies to all ranks."""
        self._world = weakref.ref(dist.group.WORLD)  # the engine owns the group, or `shutdown` ends it
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._set_ids = itertools.count(1)
        self.set_ranks: dict[int, list[int]] = {0: list(range(self.size))}
        """Ranks of each process set, by its number; 0 is the set of all ranks."""
        self._workers = {0: self._start_worker(0, self.set_ranks[0], None)}
        self._name_counts: dict[str, itertools.count[int]] = {}
        # locks: while an automatic name is counted
        self._lock = threading.Lock()

    def is_current(self) -> bool:
        """Return whether the process group still exists."""
        return dist.is_initialized() and self._world() is dist.group.WORLD

    def _start_worker(self, set_id: int, ranks: Sequence[int], group: dist.ProcessGroup | None) -> Worker:
        communicator = Communicator(ranks, self.rank, group, self._backend)
        board = JoinBoard(get_default_store(), self.rank, self.size) if set_id == 0 else None
        worker_type = NegotiatingWorker if is_strict() else Worker
        return worker_type(communicator, board, str(set_id), self._is_superseded)

    def get_worker(self, set_id: int | None) -> Worker:
        """Return the worker of a process set that contains this rank."""
        if set_id not in self.set_ranks:
            raise ValueError("the process set is not registered; pass it to hvd.init or to hvd.add_process_set")
        if set_id not in self._workers:
            raise HorovodInternalError(
                f"rank {self.rank} is not in the process set of the ranks {self.set_ranks[set_id]}; "
                "let only these ranks call the function"
            )
        return self._workers[set_id]

    def add_set(self, ranks: Sequence[int]) -> int:
        """Make a group for some ranks, and return its number. A collective of all ranks."""
        self._meet(f"add process set {list(ranks)}")
        group: Any = dist.new_group(list(ranks), backend=self._backend)
        number = next(self._set_ids)
        self.set_ranks[number] = list(ranks)
        if self.rank in ranks:
            self._groups[number] = group
            self._workers[number] = self._start_worker(number, ranks, group)
        return number

    def remove_set(self, number: int) -> None:
        """End the group of a process set. A collective of all ranks."""
        self._meet(f"remove process set {number}")
        del self.set_ranks[number]
        if number in self._workers and self._workers.pop(number).stop():
            dist.destroy_process_group(self._groups.pop(number))

    def _meet(self, name: str) -> None:
        from dtkit.integrations.horovod.collectives import BarrierOperation

        # waits: a collective, limited by the process group's timeout
        self._workers[0].submit(BarrierOperation(), name).wait()

    def make_name(self, kind: str, name: str | None) -> str:
        """Return "kind.name", or a numbered name that is the same on all ranks that call in the same order."""
        if name is not None:
            return f"{kind}.{name}"
        with self._lock:
            return f"{kind}.noname.{next(self._name_counts.setdefault(kind, itertools.count(1)))}"

    def close(self) -> bool:
        """End all workers; return whether all of them ended. Those that wait for other ranks don't."""
        have_stopped = [worker.stop() for worker in self._workers.values()]
        return all(have_stopped)


_current: list[Context] = []


def is_strict() -> bool:
    """Return whether operations are negotiated and checked."""
    return os.environ.get(CHECK_VARIABLE, "0") not in {"", "0"}


def has_context() -> bool:
    """Return whether `init` was called in the current process group."""
    return bool(_current) and _current[0].is_current()


def get_context() -> Context:
    """Return the context, or raise NotInitializedError."""
    if not has_context():
        raise NotInitializedError
    return _current[0]


def set_context(context: Context | None) -> None:
    """Replace the context; None for a shutdown."""
    _current[:] = [] if context is None else [context]

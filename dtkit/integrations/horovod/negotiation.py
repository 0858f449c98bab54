"""A worker that runs operations that all ranks have requested, in any order (``HOROVOD_CHECK=1``).

While a rank has operations to run, its worker takes part in *cycles*. In a cycle all ranks exchange the lists of their
operations, by name and signature. Each rank runs the operations that are in all lists. If signatures differ, all ranks
raise the same error. A cycle costs about two small messages per rank.
"""

from __future__ import annotations

import dataclasses
import os
import queue
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import run_guarded
from dtkit.integrations import timeouts
from dtkit.integrations.horovod.collectives import JOIN, check_signatures, mirror
from dtkit.integrations.horovod.exceptions import HorovodInternalError
from dtkit.integrations.horovod.worker import Handle, Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

_STALL_VARIABLE = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"  # Horovod's own

Entry = tuple[str, dict[str, Any]]
"""Name and signature of an operation."""


@dataclasses.dataclass
class Cycle:
    """Decision of a cycle: the operations to run, in order, and which ranks have joined."""

    ready: list[str]
    joined: list[int]
    """Positions in the process set."""

    def has_all_joined(self, size: int) -> bool:
        """Return whether no rank has data left."""
        return len(self.joined) == size


def plan_cycle(lists: Sequence[Sequence[Entry]]) -> Cycle:
    """Decide from all ranks' lists, in rank order, which operations they run now."""
    joined = [k for k, entries in enumerate(lists) if any(signature["operation"] == JOIN for _, signature in entries)]
    active = [[name for name, _ in entries] for k, entries in enumerate(lists) if k not in joined]
    if not active:
        return Cycle([], joined)
    common = set(active[0]).intersection(*active[1:])
    return Cycle([name for name in active[0] if name in common], joined)


class NegotiatingWorker(Worker):
    """See the module's docstring."""

    def _run_loop(self) -> None:
        pending: dict[str, Handle] = {}
        joined: list[int] = []
        while self._take_submitted(pending):
            if pending:
                joined = self._run_cycle(pending, joined)
        for handle in pending.values():
            handle.fail(HorovodInternalError("Horovod has been shut down. The other ranks did not ask for it"))

    def _take_submitted(self, pending: dict[str, Handle]) -> bool:
        """Take this rank's submitted operations; wait for some if none is pending. Return False to stop."""
        try:
            # waits: without a limit only in a daemon thread that has nothing to do
            handle = self._queue.get(timeout=timeouts.HOROVOD_CYCLE_S if pending else None)
            while handle is not None:
                pending[handle.name] = handle
                handle = self._queue.get_nowait()
        except queue.Empty:
            return True
        return False

    def _run_cycle(self, pending: dict[str, Handle], joined_before: list[int]) -> list[int]:
        """Run the operations that all ranks wait for; return the positions of the ranks that have joined."""
        entries = [(name, handle.collective.make_signature()) for name, handle in pending.items()]
        lists: Any = self._make_broken_error() if self._broken_by is not None else self._gather(entries)
        if isinstance(lists, Exception):
            for handle in pending.values():
                self._end(handle, lists)
            pending.clear()
            return []
        cycle = plan_cycle(lists)
        for name in cycle.ready:
            if self._broken_by is None:
                self._run_ready(name, pending, lists, cycle)
        if not cycle.has_all_joined(self.communicator.size):
            self._fail_overdue(pending, lists)
            return cycle.joined
        last = [k for k in cycle.joined if k not in joined_before][-1]
        for name in [name for name, handle in pending.items() if handle.collective.kind == JOIN]:
            self._finish(pending.pop(name), lambda: self.communicator.ranks[last])
        return []

    def _gather(self, entries: list[Entry]) -> list[list[Entry]] | Exception:
        return run_guarded(lambda: self.communicator.all_gather_json(entries), lambda error: error)

    def _run_ready(self, name: str, pending: dict[str, Handle], lists: Sequence[Sequence[Entry]], cycle: Cycle) -> None:
        active = [k for k in range(self.communicator.size) if k not in cycle.joined]
        signatures = [dict(lists[k])[name] for k in active]
        ranks = [self.communicator.ranks[k] for k in active]
        error = run_guarded(lambda: check_signatures(signatures, ranks, name), lambda error: error)
        if self.communicator.index in cycle.joined:
            if error is None:
                run_guarded(lambda: mirror(signatures[0], self.communicator), lambda error: error)
            return
        handle = pending.pop(name)
        if error is not None:
            self._end(handle, error)
        else:
            self._finish(handle, lambda: handle.collective.run(self.communicator))

    def _fail_overdue(self, pending: dict[str, Handle], lists: Sequence[Sequence[Entry]]) -> None:
        """Fail operations that other ranks have not requested in time."""
        limit = float(os.environ.get(_STALL_VARIABLE, timeouts.HOROVOD_STALL_TIMEOUT_S))
        late = [name for name, h in pending.items() if h.waited_s > limit and h.collective.kind != JOIN]
        for name in late:
            others = [
                f"rank {rank} waits for {', '.join(other for other, _ in entries)}"
                for rank, entries in zip(self.communicator.ranks, lists, strict=True)
                if name not in dict(entries)
            ]
            message = f"{name} has waited for {limit:g} s ({_STALL_VARIABLE}); instead, {'; '.join(others)}"
            self._end(pending.pop(name), HorovodInternalError(message))

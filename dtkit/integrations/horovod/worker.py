"""A thread that runs the collectives of one process set, in the order in which this rank submits them.

So callers may wait for asynchronous operations in any order, and an operation may consist of several messages. An
interrupt ends the caller's wait at once. All ranks must submit in the same order; :mod:`negotiation` has a worker that
accepts any order.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import run_guarded
from dtkit.integrations import timeouts
from dtkit.integrations.horovod.collectives import JOIN, Collective, mirror
from dtkit.integrations.horovod.exceptions import HorovodInternalError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.integrations.horovod.communicator import Communicator
    from dtkit.integrations.horovod.joining import JoinBoard


class Handle:
    """One submitted operation. `synchronize` of the interface waits for it."""

    def __init__(self, collective: Collective, name: str, look_at_others: Callable[[Handle], None]) -> None:
        self.collective, self.name = collective, name
        self.finish: Callable[[Any], Any] = lambda result: result
        """Makes the function's result of the collective's."""
        self._look_at_others = look_at_others
        self._submitted_at = time.monotonic()
        self._done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None
        cuda = next((tensor.device for tensor in collective.tensors if tensor.is_cuda), None)
        self._device = cuda
        self._inputs_ready = None if cuda is None else torch.cuda.current_stream(cuda).record_event()

    @property
    def waited_s(self) -> float:
        """Time since the operation was submitted, in seconds."""
        return time.monotonic() - self._submitted_at

    def is_done(self) -> bool:
        """Return whether the operation has ended, with a result or an error."""
        if not self._done.is_set():
            self._look_at_others(self)
        return self._done.is_set()

    def wait(self) -> Any:
        """Wait for the operation, and return its result. Raises HorovodInternalError if it failed."""
        while not self._done.wait(timeouts.HOROVOD_JOIN_POLL_S):
            self._look_at_others(self)
        if self._error is not None:
            kind = MismatchError if isinstance(self._error, MismatchError) else HorovodInternalError
            raise kind(str(self._error)) from self._error
        return self._result

    def run(self, work: Callable[[], Any]) -> None:
        """Run the operation on the worker's thread, and store its result or error."""
        self._error = run_guarded(lambda: self._store(work), lambda error: error)
        self._done.set()

    def _store(self, work: Callable[[], Any]) -> None:
        if self._device is None:
            self._result = self.finish(work())
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            assert self._inputs_ready is not None
            stream.wait_event(self._inputs_ready)
            self._result = self.finish(work())
            stream.synchronize()

    def has_lost_step(self) -> bool:
        """Return whether the operation failed on this rank in a way that other ranks may not have noticed."""
        return self._error is not None and not isinstance(self._error, HorovodInternalError)

    def fail(self, error: Exception) -> None:
        """End the operation with an error."""
        self._error = error
        self._done.set()


class Worker:
    """The thread of one process set."""

    def __init__(
        self, communicator: Communicator, board: JoinBoard | None, name: str, is_superseded: Callable[[], bool]
    ) -> None:
        """`board` is None for a set whose ranks can't join. `is_superseded` tells whether a newer group is formed."""
        self.communicator, self._board, self._is_superseded = communicator, board, is_superseded
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._names: set[str] = set()
        self._broken_by: str | None = None
        """Name of an operation after which this rank may be out of step with the others."""
        # locks: while the table of names changes
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run_loop, name=f"dtkit-horovod-{name}", daemon=True)
        self._thread.start()

    def submit(self, collective: Collective, name: str, finish: Callable[[Any], Any] | None = None) -> Handle:
        """Queue an operation.

        Raises ValueError if one of this name has not ended, HorovodInternalError after one that broke off.
        """
        if self._broken_by is not None:
            raise self._make_broken_error()
        handle = Handle(collective, name, self._look_at_others)
        if finish is not None:
            handle.finish = finish
        with self._lock:
            if name in self._names:
                raise ValueError(
                    f"Requested to {collective.kind} a tensor with the same name as another tensor that is currently "
                    f"being processed: {name}. If you want to request another tensor, use a different tensor name."
                )
            self._names.add(name)
        self._queue.put(handle)
        return handle

    def stop(self) -> bool:
        """End the thread after it has run all submitted operations; return whether it ended in time."""
        self._queue.put(None)
        self._thread.join(timeouts.HOROVOD_STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def _look_at_others(self, handle: Handle) -> None:
        """Help ranks that have joined: they must know which operation this rank waits for.

        Fail an operation that waits for a lost rank. gloo may not notice the loss: if a write fails before it reads the
        connection's end, it waits on.
        """
        if handle.waited_s > timeouts.HOROVOD_LOSS_CHECK_S and self._is_superseded():
            self._broken_by = handle.name
            self._end(handle, HorovodInternalError(f"{handle.name} waited for a rank that was lost or started again"))
        elif self._board is not None:
            self._board.look()

    def _run_loop(self) -> None:
        # waits: a daemon thread; nobody waits for it
        while (handle := self._queue.get()) is not None:
            self._run_one(handle)

    def _make_broken_error(self) -> HorovodInternalError:
        """Return the error of all later operations: on other ranks they could meet a different operation, and wait."""
        return HorovodInternalError(
            f"{self._broken_by} has failed on this rank before, maybe not on the others, which could wait for it. "
            "Let the script end, or call hvd.shutdown() and hvd.init() on all ranks"
        )

    def _run_one(self, handle: Handle) -> None:
        if self._broken_by is not None:
            self._end(handle, self._make_broken_error())
            return
        if handle.collective.kind == JOIN:
            self._finish(handle, self._join)
            return
        if self._board is not None:
            self._board.begin(handle.collective.make_signature)
        self._finish(handle, lambda: handle.collective.run(self.communicator))

    def _finish(self, handle: Handle, work: Callable[[], Any]) -> None:
        with self._lock:
            self._names.discard(handle.name)  # before the caller continues, since it may use the name again
        handle.run(work)
        if handle.has_lost_step():
            self._broken_by = handle.name

    def _end(self, handle: Handle, error: Exception) -> None:
        with self._lock:
            self._names.discard(handle.name)
        handle.fail(error)

    def _join(self) -> int:
        assert self._board is not None, "only the global process set can join"
        return self._board.join(lambda signature: mirror(signature, self.communicator))

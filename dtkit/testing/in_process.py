"""The real session of an engine in this process, for tests with world size 1: its operations are not fake."""

from __future__ import annotations

import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dtkit.engine import server
from dtkit.engine.session import Session
from dtkit.messages import Reply
from dtkit.types import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.messages import OutputItem
    from dtkit.rpc.transport import Hosts

    Publish = Callable[[int, list[OutputItem]], None]


class InProcessTransport:
    """One engine with the id 10, whose session a thread of this process serves.

    Interrupts have no effect, because Python handles signals in the main thread.
    """

    hosts: Hosts | None = None

    def __init__(self) -> None:
        self.engine_ids: Sequence[int] = [10]
        self.session = Session()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dtkit-engine")
        self._is_closed = False

    def send(self, rank: int, message: bytes, listen: Publish | None = None) -> Future[Reply[Any]]:  # noqa: ARG002
        """See :class:`~dtkit.rpc.transport.Transport`."""
        if self._is_closed:
            future: Future[Reply[Any]] = Future()
            future.set_result(Reply(failure=Failure(0, "?", "EngineLost", "it was closed", "", kind="lost")))
            return future
        return self._executor.submit(self._serve, message, listen)

    def _serve(self, message: bytes, listen: Publish | None) -> Reply[Any]:
        # unpickles: made in the same process
        reply: Reply[Any] = pickle.loads(server.handle_request(message, listen, self.session))
        return reply

    def interrupt(self, ranks: Sequence[int], *, wake: bool = False) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""

    def check_reachable(self) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""

    def track_processes(self, pids: Mapping[int, int]) -> None:
        """Do nothing: its engines have no processes of their own."""

    def find_lost_ranks(self) -> list[int]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        return []

    def kill(self, ranks: Sequence[int], timeout: float = 0) -> bool:  # noqa: ARG002 - nothing is ended
        """See :class:`~dtkit.rpc.transport.Transport`. This process can't be ended."""
        return False

    def end_processes(self, pids: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`. The engine has no process of its own."""

    def replace(self, ranks: Sequence[int]) -> None:  # noqa: ARG002 - there is one rank
        """See :class:`~dtkit.rpc.transport.Transport`."""
        self._leave()
        self.session = Session()

    def set_aside(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`. Only engines that `replace` has started are set aside."""

    def drop(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`. The only rank stays."""

    def detach(self) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`. No other notebook can take this process over."""

    def close(self) -> None:
        """Leave the process group and end the thread. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._leave()
            # waits: for the thread, which has done its last call
            self._executor.shutdown()

    def _leave(self) -> None:
        # waits: for calls that were sent before, each of which is limited
        self._executor.submit(self.session.operations["leave_group"]).result()

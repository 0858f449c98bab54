"""Waits for messages that may never arrive, in a separate thread, so that the caller can stop waiting.

When a connection ends, gloo ends all waits except for a message that is half read or half written (pair.cc,
`signalException`). That wait lasts until the timeout, and nothing in Python can interrupt it. This rarely happens to
small messages. For large ones, the caller checks whether the connections are still open.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import TYPE_CHECKING

from dtkit._util import timeouts

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

LARGE_MESSAGE_BYTES = 2**18
"""Size from which a connection is likely to end within a message, because a message takes several reads."""

_ResultQueue = queue.SimpleQueue["RuntimeError | None"]
_WaitRequest = tuple["Sequence[dist.Work]", "dt.timedelta", _ResultQueue]


class CancellableWait:
    """A waiting thread for one generation of the process group. If the caller stops waiting, the thread still waits."""

    def __init__(self, has_disconnected: Callable[[], bool]) -> None:
        """Use `has_disconnected` to check whether a connection has ended."""
        self._has_disconnected = has_disconnected
        self._requests: queue.SimpleQueue[_WaitRequest | None] = queue.SimpleQueue()
        threading.Thread(target=_serve_requests, args=(self._requests,), name="dtkit-messages", daemon=True).start()
        weakref.finalize(self, self._requests.put, None)

    def wait(self, works: Sequence[dist.Work], timeout: dt.timedelta) -> None:
        """Wait for all works. Raises RuntimeError if a connection ends, or one takes longer than `timeout`."""
        answer: _ResultQueue = queue.SimpleQueue()  # much faster than a Future
        self._requests.put((works, timeout, answer))
        ended = False
        while True:
            with contextlib.suppress(queue.Empty):
                error = answer.get(timeout=timeouts.CONNECTION_POLL_S)
                break
            if ended:
                raise RuntimeError("Connection closed: a message to or from another rank is incomplete")
            ended = self._has_disconnected()
        if error is not None:
            raise error


def _serve_requests(requests: queue.SimpleQueue[_WaitRequest | None]) -> None:
    # waits: a daemon thread; nobody waits for it
    while (request := requests.get()) is not None:
        works, timeout, answer = request
        answer.put(_wait_for_works(works, timeout))
        del works, request, answer  # release their tensors


def _wait_for_works(works: Sequence[dist.Work], timeout: dt.timedelta) -> RuntimeError | None:
    try:
        for work in works:
            work.wait(timeout)
    except RuntimeError as error:
        return error
    return None

"""Waiting for messages that may never come, in a thread of its own, so that who asked for them can give up.

gloo tells whoever waits when a connection ends, but for a message that is half read or half written (pair.cc,
`signalException`): who waits for that, waits until the time limit, and nothing in Python reaches him. A small message
is hardly ever caught half way. A large one is, so whether connections still stand is looked at from outside.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

LARGE_MESSAGE_BYTES = 2**18
"""Bytes from which a message may well be caught half way: more than one read takes in."""
_POLL_S = 0.1  # between two looks whether the connections still stand

_ResultQueue = queue.SimpleQueue["RuntimeError | None"]
_WaitRequest = tuple["Sequence[dist.Work]", "dt.timedelta", _ResultQueue]


class CancellableWait:
    """One thread, for one generation of the process group: it stays with what it waits for when it is given up."""

    def __init__(self, has_disconnected: Callable[[], bool]) -> None:
        """`over` says whether a connection has ended."""
        self._has_disconnected = has_disconnected
        self._requests: queue.SimpleQueue[_WaitRequest | None] = queue.SimpleQueue()
        threading.Thread(target=_serve_requests, args=(self._requests,), name="dtkit-messages", daemon=True).start()
        weakref.finalize(self, self._requests.put, None)

    def wait(self, works: Sequence[dist.Work], timeout: dt.timedelta) -> None:
        """Until all have come. RuntimeError where they can't any more, or not within `limit` each."""
        answer: _ResultQueue = queue.SimpleQueue()  # a Future, made in Python, took 0.1 ms of a step's time
        self._requests.put((works, timeout, answer))
        ended = False
        while True:
            with contextlib.suppress(queue.Empty):
                error = answer.get(timeout=_POLL_S)
                break
            if ended:
                raise RuntimeError("Connection closed: a message from another rank, or to one, broke off half way")
            ended = self._has_disconnected()
        if error is not None:
            raise error


def _serve_requests(requests: queue.SimpleQueue[_WaitRequest | None]) -> None:
    # waits: a daemon thread; nobody waits for it
    while (order := requests.get()) is not None:
        works, limit, answer = order
        answer.put(_wait_for_works(works, limit))
        del works, order, answer  # the tensors that they hold are not this thread's


def _wait_for_works(works: Sequence[dist.Work], timeout: dt.timedelta) -> RuntimeError | None:
    try:
        for work in works:
            work.wait(timeout)
    except RuntimeError as error:
        return error
    return None

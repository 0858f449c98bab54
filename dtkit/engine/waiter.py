"""Waiting for messages that may never come, in a thread of its own, so that who asked for them can give up.

gloo tells whoever waits when a connection ends, but for a message that is half read or half written (pair.cc,
`signalException`): who waits for that, waits until the time limit, and nothing in Python reaches him. A small message
is hardly ever caught half way. A large one is, so whether connections still stand is looked at from outside.
"""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

LARGE = 2**18
"""Bytes from which a message may well be caught half way: more than one read takes in."""
_LOOK_S = 0.1  # between two looks whether the connections still stand

_Order = tuple["Sequence[dist.Work]", "dt.timedelta", "Future[None]"]


class Waiter:
    """One thread, for one generation of the process group: it stays with what it waits for when it is given up."""

    def __init__(self, over: Callable[[], bool]) -> None:
        """`over` says whether a connection has ended."""
        self._over = over
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._orders,), name="dtkit-messages", daemon=True).start()
        weakref.finalize(self, self._orders.put, None)

    def wait(self, works: Sequence[dist.Work], limit: dt.timedelta) -> None:
        """Until all have come. RuntimeError where they can't any more, or not within `limit` each."""
        done: Future[None] = Future()
        self._orders.put((works, limit, done))
        while not _ended(done, _LOOK_S):
            if self._over() and not _ended(done, _LOOK_S):
                raise RuntimeError("Connection closed: a message from another rank, or to one, broke off half way")
        done.result()


def _ended(done: Future[None], seconds: float) -> bool:
    try:
        done.exception(seconds)
    except TimeoutError:
        return False
    return True


def _serve(orders: queue.SimpleQueue[_Order | None]) -> None:
    while (order := orders.get()) is not None:
        works, limit, done = order
        try:
            for work in works:
                work.wait(limit)
        except RuntimeError as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del works, order, done  # the tensors that they hold are not this thread's

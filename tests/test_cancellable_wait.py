"""Waits for messages that arrive, fail, or stay incomplete because the connection ends."""

from __future__ import annotations

import datetime as dt
import gc
import threading
from typing import Any

import pytest

from dtkit.engine.comm.cancellable_wait import CancellableWait

LIMIT = dt.timedelta(seconds=30)


class Message:
    """A stand-in for torch's Work that arrives or raises on request."""

    def __init__(self, error: Exception | None = None) -> None:
        self.came, self.error = threading.Event(), error
        if error is not None:
            self.came.set()

    def wait(self, limit: dt.timedelta) -> None:
        assert self.came.wait(limit.total_seconds())
        if self.error is not None:
            raise self.error


def waiter(ended: threading.Event | None = None) -> Any:
    return CancellableWait((ended or threading.Event()).is_set)


def test_a_wait_ends_when_all_messages_have_arrived():
    one, other = Message(), Message()
    made, over = waiter(), threading.Event()

    def wait() -> None:
        made.wait([one, other], LIMIT)
        over.set()

    thread = threading.Thread(target=wait)
    thread.start()
    one.came.set()
    assert not over.wait(0.2)
    other.came.set()
    thread.join(10)
    assert over.is_set()


def test_the_caller_gets_the_error_of_a_message_and_can_wait_again():
    made = waiter()
    with pytest.raises(RuntimeError, match="Timed out"):
        made.wait([Message(RuntimeError("Timed out waiting 10ms"))], LIMIT)
    late = Message()
    late.came.set()
    made.wait([late], LIMIT)  # the thread continues


def test_a_wait_is_canceled_when_the_connection_ends():
    from dtkit.engine.comm.process_group import is_lost_peer_error

    ended, never = threading.Event(), Message()
    made = waiter(ended)
    timer = threading.Timer(0.05, ended.set)
    timer.start()
    try:
        with pytest.raises(RuntimeError, match="is incomplete") as caught:
            made.wait([never], LIMIT)
        assert is_lost_peer_error(caught.value)  # it does not count as this rank's own error
    finally:
        never.came.set()


def test_the_thread_ends_with_its_waiter():
    before = set(threading.enumerate())
    made = waiter()
    (thread,) = set(threading.enumerate()) - before
    del made
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()

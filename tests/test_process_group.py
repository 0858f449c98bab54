"""Lifetime of a process group that is left while work is in flight, tested with a stand-in."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from dtkit.engine.comm.process_group import hold_group_until_done


class Work:
    """Work in flight until a test ends it; torch's group waits for its work when it is freed."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Group:
    """Object that can be freed."""


def test_a_group_is_held_while_it_is_in_use_and_freed_in_a_thread():
    work, group, gone = Work(), Group(), threading.Event()
    by: list[str] = []
    weakref.finalize(group, lambda: (by.append(threading.current_thread().name), gone.set()))
    held: Any = work
    hold_group_until_done(held, group, 60)
    del group
    assert not gone.is_set()
    work.ended.set()
    assert gone.wait(10)
    assert by == ["dtkit-held"]

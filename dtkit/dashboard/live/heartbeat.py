"""Signs of life for a page. Without them, a dead kernel would look like a paused run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dtkit._util import timeouts

if TYPE_CHECKING:
    from collections.abc import Callable

_CHECKS = 2
"""Looks in each period of the signs, so that a sign comes soon after the period ends."""


class Heartbeat:
    """Calls `send` on a thread of its own, also while a cell blocks the kernel: twice in each period of the signs.

    The thread ends when `send` returns False, and :meth:`start` starts another one.
    """

    def __init__(self, send: Callable[[], bool]) -> None:
        self._send = send
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start, unless it runs or was stopped."""
        if not self._stopped.is_set() and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="dtkit-heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped.set()

    def _run(self) -> None:
        while self._send() and not self._stopped.wait(timeouts.LIVE_HEARTBEAT_S / _CHECKS):
            pass

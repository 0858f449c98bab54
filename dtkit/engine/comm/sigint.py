"""SIGINT on an engine: it ends what a request does, and never the making of its answer.

A rank that has finished, or failed, answers within a millisecond; the next request may be waiting already. An
interrupt in such a moment, sent since another rank is stuck, finds nothing to interrupt. But ipykernel lets SIGINT
raise from a message's arrival until its answer has left, and swallows KeyboardInterrupt in its own code: no answer
comes then, and the notebook waits for one. So what SIGINT does is decided here.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_WORK = ("do_apply", "do_execute")  # ipykernel's functions that run what others sent: they answer for what is raised


class Interrupts:
    """Decides whether SIGINT raises KeyboardInterrupt. In the main thread only: elsewhere nothing comes."""

    def __init__(self) -> None:
        self.over = False
        """The work is done: until the answer has left there is nothing to interrupt. Set without a call, before which
        an interrupt would come."""
        self.came = False
        """Whether the request was interrupted, whatever error it ended with: libraries turn one into another."""
        self._serving = self._early = False
        self._kernel: Any = None
        self._before: Any = signal.SIG_DFL

    def govern(self, kernel: Any) -> None:
        """Take the place of ipykernel's own hooks around each message. Idempotent; amid a message."""
        if kernel is not self._kernel:
            self._kernel, self._before = kernel, kernel.saved_sigint_handler
            kernel.pre_handler_hook, kernel.post_handler_hook = self._arrived, self._answered

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """While a request is served, until it is over. One that came a moment too early is taken now."""
        early, self._early = self._early, False
        self.over, self.came = False, early
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._take)
        self._serving = True
        try:
            yield
        finally:
            self.over = True
            self._serving = False
            if self._kernel is None:
                signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raise the one that came too early."""
        if self.came:
            raise KeyboardInterrupt

    def _arrived(self) -> None:
        self._serving = self.over = self._early = False
        self._before = signal.signal(signal.SIGINT, self._take)

    def _answered(self) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _take(self, _number: int, frame: FrameType | None) -> None:
        self.came = True
        if self.over:
            return
        if self._serving or _at_work(frame):
            raise KeyboardInterrupt
        self._early = True


def _at_work(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name not in _WORK:
        frame = frame.f_back
    return frame is not None

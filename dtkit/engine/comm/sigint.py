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

_IPYKERNEL_HANDLERS = (
    "do_apply",
    "do_execute",
)  # ipykernel's functions that run what others sent: they answer for what is raised


class SigintHandler:
    """Decides whether SIGINT raises KeyboardInterrupt. In the main thread only: elsewhere nothing comes."""

    def __init__(self) -> None:
        self.work_done = False
        """The work is done: until the answer has left there is nothing to interrupt. Set without a call, before which
        an interrupt would come."""
        self.was_interrupted = False
        """Whether the request was interrupted, whatever error it ended with: libraries turn one into another."""
        self._is_serving = self._arrived_early = False
        self._kernel: Any = None
        self._previous_handler: Any = signal.SIG_DFL

    def attach_to_kernel(self, kernel: Any) -> None:
        """Take the place of ipykernel's own hooks around each message. Idempotent; amid a message."""
        if kernel is not self._kernel:
            self._kernel, self._previous_handler = kernel, kernel.saved_sigint_handler
            kernel.pre_handler_hook, kernel.post_handler_hook = self._on_message, self._on_reply_sent

    @contextlib.contextmanager
    def handle_during_request(self) -> Iterator[None]:
        """While a request is served, until it is over. One that came a moment too early is taken now."""
        early, self._arrived_early = self._arrived_early, False
        self.work_done, self.was_interrupted = False, early
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._handle_sigint)
        self._is_serving = True
        try:
            yield
        finally:
            self.work_done = True
            self._is_serving = False
            if self._kernel is None:
                signal.signal(signal.SIGINT, before)

    def raise_if_interrupted(self) -> None:
        """Raise the one that came too early."""
        if self.was_interrupted:
            raise KeyboardInterrupt

    def _on_message(self) -> None:
        self._is_serving = self.work_done = self._arrived_early = False
        self._previous_handler = signal.signal(signal.SIGINT, self._handle_sigint)

    def _on_reply_sent(self) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def _handle_sigint(self, _signum: int, frame: FrameType | None) -> None:
        self.was_interrupted = True
        if self.work_done:
            return
        if self._is_serving or _is_in_kernel_handler(frame):
            raise KeyboardInterrupt
        self._arrived_early = True


def _is_in_kernel_handler(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name not in _IPYKERNEL_HANDLERS:
        frame = frame.f_back
    return frame is not None

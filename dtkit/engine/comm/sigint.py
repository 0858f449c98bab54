"""Handling of SIGINT on an engine: it ends the work of a request, but never the reply.

The notebook interrupts all ranks if one is stuck. A rank that has already finished or failed is about to reply, and has
nothing to interrupt. But ipykernel lets SIGINT raise from a message's arrival until its reply is sent. It swallows
KeyboardInterrupt in its own code. Then the notebook would wait for a reply that never comes. So this module replaces
ipykernel's handling.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_IPYKERNEL_HANDLERS = ("do_apply", "do_execute")
"""ipykernel's functions that run the code of a message, and reply with its error."""


class SigintHandler:
    """Decides whether SIGINT raises KeyboardInterrupt. Works in the main thread only."""

    def __init__(self) -> None:
        self.work_done = False
        """Whether the work is done, so that there is nothing to interrupt until the reply is sent. The attribute is set
        without a call, since an interrupt could come before a call."""
        self.was_interrupted = False
        """Whether the request was interrupted, even if a library turned the interrupt into another error."""
        self._is_serving = self._arrived_early = False
        self._kernel: Any = None
        self._previous_handler: Any = signal.SIG_DFL

    def attach_to_kernel(self, kernel: Any) -> None:
        """Replace ipykernel's hooks around each message. Idempotent; called during a message."""
        if kernel is not self._kernel:
            self._kernel, self._previous_handler = kernel, kernel.saved_sigint_handler
            kernel.pre_handler_hook, kernel.post_handler_hook = self._on_message, self._on_reply_sent

    @contextlib.contextmanager
    def handle_during_request(self) -> Iterator[None]:
        """Handle SIGINT while the context serves a request, including one that came just before."""
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
        """Raise KeyboardInterrupt if the request was interrupted."""
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

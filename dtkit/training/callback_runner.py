"""Whose turn it is at the end of an epoch: callbacks are called before the next one begins, on a thread of their own.

They may ask the run for anything, and the run's own thread goes on reading what it is asked for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dtkit._util.guard import return_error, run_guarded_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

CALLBACK_THREAD_NAME = "dtkit-callbacks"
"""The name of the thread that callbacks run on."""


class CallbackRunner:
    """The callbacks of one run: None where it has none."""

    def __init__(self, callbacks: Callable[[], None] | None) -> None:
        self._callbacks = callbacks
        self._token: object = None  # the call that is under way
        self.last_called_step = 0
        """The step after which callbacks were called last."""

    @property
    def is_running(self) -> bool:
        """Whether callbacks are at work."""
        return self._token is not None

    def is_due(self, step: int, steps_per_epoch: int) -> bool:
        """Whether callbacks are to be called after so many steps, or are at work: nothing is sent before."""
        if self.is_running:
            return True
        return self._callbacks is not None and step % steps_per_epoch == 0 and step > self.last_called_step

    def start(self, step: int, on_done: Callable[[object, BaseException | None], None]) -> None:
        """Call them, if they are not at work; `over` is called on their thread, with a token for :meth:`ended`."""
        callbacks = self._callbacks
        if self.is_running or callbacks is None:
            return
        token = self._token = object()
        self.last_called_step = step

        def call() -> None:
            on_done(token, run_guarded_in_thread(callbacks, return_error))

        threading.Thread(target=call, name=CALLBACK_THREAD_NAME, daemon=True).start()

    def mark_done(self, token: object) -> bool:
        """They have returned: whether these were the ones that the run still waits for."""
        if token is not self._token:
            return False
        self._token = None
        return True

    def reset(self) -> None:
        """Wait for none that may still be at work."""
        self._token = None

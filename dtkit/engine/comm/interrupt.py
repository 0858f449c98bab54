"""End a blocked collective on SIGINT. No exception and no signal handler of Python interrupts it."""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def abort_on_sigint(abort: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT end a blocked collective: the signal wakes a thread, which calls `abort`.

    The interpreter writes the signal's number to the wakeup descriptor at once, even while the main thread runs C code.
    Only the main thread can be interrupted, so the context does nothing in others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _get_sigint_watcher().call_on_sigint(abort):
        yield


class _SigintWatcher:
    """One thread for all calls, since starting a thread for each dispatch takes milliseconds on busy cores."""

    def __init__(self) -> None:
        # port: a socket pair within the process; nobody else can connect
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # locks: while a group's sockets are shut, for a quarter of a second at most
        self._lock = threading.Lock()  # no call ends while its `abort` runs
        self._abort: Callable[[], None] | None = None
        threading.Thread(target=self._watch_loop, name="dtkit-interrupt", daemon=True).start()

    @contextlib.contextmanager
    def call_on_sigint(self, abort: Callable[[], None]) -> Iterator[None]:
        """Let SIGINT call `abort` within the context."""
        previous, self._abort = self._abort, abort
        descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            self._abort = previous  # an assignment instead of a call, before which an interrupt could come
            signal.set_wakeup_fd(descriptor)
            with self._lock:
                pass

    def _watch_loop(self) -> None:
        # waits: a daemon thread; nobody waits for it
        while signals := self._reader.recv(64):
            with self._lock:
                abort = self._abort
                if signal.SIGINT in signals and abort is not None:
                    abort()


@functools.cache
def _get_sigint_watcher() -> _SigintWatcher:
    return _SigintWatcher()

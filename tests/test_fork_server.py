"""The fork server's handling of engines that have ended, without processes."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

from dtkit.cluster.forkserver.server import ForkServer

if TYPE_CHECKING:
    import pytest


def test_server_survives_engines_that_end_at_once(monkeypatch: pytest.MonkeyPatch):
    """The signal of the second one interrupts the handler of the first."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.socket() as listener:
        server = ForkServer(listener)
        server._pids.update([101, 102])
        reaped: set[int] = set()

        def wait(pid: int, _options: int) -> tuple[int, int]:
            if pid in reaped:
                raise ChildProcessError
            reaped.add(pid)
            server._reap()
            return pid, 0

        monkeypatch.setattr(os, "waitpid", wait)
        server._reap()
        assert not server._pids

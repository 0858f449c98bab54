"""The fork server's handling of engines that have ended, without processes."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from dtkit.cluster.forkserver.server import ForkServer


def test_server_survives_engines_that_end_at_once(monkeypatch: pytest.MonkeyPatch):
    """The signal of the second one interrupts the handler of the first."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("dtkit.cluster.forkserver.server.adopt_orphans", lambda: None)
    running = [101, 102]

    def wait(_pid: int, _options: int) -> tuple[int, int]:
        if not running:
            raise ChildProcessError
        pid = running.pop()
        server._reap()
        return pid, 0

    with socket.socket() as listener:
        server = ForkServer(listener)
        monkeypatch.setattr(os, "waitpid", wait)
        server._reap()
        assert not running
        with pytest.raises(SystemExit):
            server._terminate()

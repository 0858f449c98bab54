"""The fork server's handling of engines that have ended, without processes."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dtkit.cluster.exit_status import describe_exit, read_exit_code
from dtkit.cluster.forkserver.server import ForkServer

if TYPE_CHECKING:
    from pathlib import Path


def test_server_survives_engines_that_end_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The signal of the second one interrupts the handler of the first."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("dtkit.cluster.forkserver.server.adopt_orphans", lambda: None)
    running = [101, 102]

    def peek(*_: object) -> SimpleNamespace:
        if not running:
            raise ChildProcessError
        return SimpleNamespace(si_pid=running[-1], si_code=os.CLD_EXITED, si_status=running[-1] - 100)

    def wait(pid: int, _options: int) -> None:
        signals and signals.pop()()
        if pid not in running:
            raise ChildProcessError
        running.remove(pid)

    with socket.socket() as listener:
        server = ForkServer(listener, tmp_path)
        server._engines |= {101, 102}
        signals = [server._reap]
        monkeypatch.setattr(os, "waitid", peek)
        monkeypatch.setattr(os, "waitpid", wait)
        server._reap()
        assert not running
        assert [read_exit_code(tmp_path, pid) for pid in (101, 102)] == [1, 2]
        with pytest.raises(SystemExit):
            server._terminate()


def test_exit_code_is_told_in_words():
    assert describe_exit(3) == " (exit status 3)"
    assert (
        describe_exit(-signal.SIGKILL) == " (killed by signal 9, SIGKILL, which the kernel sends when memory runs out)"
    )
    assert describe_exit(-signal.SIGUSR1) == f" (killed by signal {int(signal.SIGUSR1)}, SIGUSR1)"
    assert describe_exit(-int(signal.SIGRTMIN) - 1) == f" (killed by signal {int(signal.SIGRTMIN) + 1})"
    assert describe_exit(None) == ""

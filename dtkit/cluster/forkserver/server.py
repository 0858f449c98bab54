"""The fork server: loads what engines need once, and forks them.

An engine spends almost three seconds of processor time on imports. A fork shares them, and most of their memory. The
server listens on a socket in the cluster's folder, which only the user can enter. It stays single-threaded, so that a
fork copies no lock that another thread holds. Engines live on if the server ends.

torch's compiler, which takes a third of all the imports, is left to the trainings that need it. More engines than cores
would then take turns to load it, so they get it from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.lazy_compiler import load_compiler
from dtkit._util.process import adopt_orphans
from dtkit._util.resources import count_cores
from dtkit.cluster.exit_status import get_code, write_exit_code
from dtkit.cluster.forkserver.protocol import ForkReply, ForkRequest

if TYPE_CHECKING:
    import socket
    from pathlib import Path


class ForkServer:
    """Listens for requests, forks, and reaps engines that have ended, and what they have left."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        self._listener, self._folder, self._is_terminating = listener, folder, False
        self._engines: set[int] = set()
        adopt_orphans()  # an engine's nanny ends after it
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())

    def serve(self) -> None:
        """Answer requests for as long as the server lives. Returns in each forked engine only."""
        is_engine = False
        while not is_engine:
            # waits: for the next request; the reaper ends this process with its cluster
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError, ValueError):  # the notebook was interrupted
                connection.settimeout(timeouts.FORK_REQUEST_TIMEOUT_S)
                request = ForkRequest(**json.loads(connection.makefile().readline()))
                if request.engines > count_cores():
                    load_compiler()
                pids = self._fork(request.engines)
                is_engine = pids is None
                if pids is not None:
                    reply = ForkReply(os.getpid(), pids)
                    connection.sendall(json.dumps(dataclasses.asdict(reply)).encode() + b"\n")
        self._listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _fork(self, count: int) -> list[int] | None:
        """Fork engines and return their pids; None in an engine."""
        pids = []
        for _ in range(count):
            if (pid := os.fork()) == 0:
                return None
            self._engines.add(pid)
            pids.append(pid)
        return pids

    def _reap(self) -> None:
        """Reap children that have ended. Another signal may interrupt this, and reap some of them.

        An engine's exit code is noted before, so that it is there once the process is gone.
        """
        try:
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in self._engines:
                    write_exit_code(self._folder, ended.si_pid, get_code(ended))
                    self._engines.discard(ended.si_pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            if self._is_terminating:
                raise SystemExit from None

    def _terminate(self) -> None:
        """End after all children: not every system has a process that reaps orphans."""
        self._is_terminating = True
        self._reap()

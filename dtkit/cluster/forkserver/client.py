"""The notebook's side of a fork server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

from dtkit._util import timeouts
from dtkit.cluster.forkserver.protocol import ForkReply, ForkRequest, connect, listen
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from pathlib import Path

_MAX_LOG_CHARS = 1000


class ForkServerClient:
    """Starts a cluster's fork server, also in place of one that has ended, and asks it for engines."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *, ends_with_client: bool = False) -> None:
        """`environment` has the variables that engines get in addition to this process's.

        The server of an agent ends with it, on a host whose controller is on another one.
        """
        self._folder, self._environment = folder, environment
        self._arguments = [str(os.getpid())] if ends_with_client else []
        self._log = folder / "log" / "ipengine-server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._question: socket.socket | None = None
        """Connection by which a server that has loaded everything will say so."""

    def start(self) -> None:
        """Start the server, which begins to load what engines need."""
        self._log.parent.mkdir(mode=0o700, exist_ok=True)
        with listen(self._folder) as listener, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dtkit.cluster.forkserver"),
                    *(str(self._folder), str(listener.fileno()), *self._arguments),
                ],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # no signals of the terminal
            )

    def load(self, timeout: float) -> bool:
        """Start the server unless it runs. Return whether it has loaded what engines need within `timeout` seconds.

        Raise ClusterError if it can't.
        """
        if self._process is None or self._process.poll() is not None:
            self.start()
            self._question = None
        try:
            if self._question is None:
                self._question = self._ask(ForkRequest(0), timeouts.FORK_REQUEST_TIMEOUT_S)
            if not select.select([self._question], [], [], timeout)[0]:
                return False
            question, self._question = self._question, None
            with question:
                _read_reply(question)
        except (OSError, ValueError):
            self.wait(timeouts.FORK_REQUEST_TIMEOUT_S)
            if self.find_server() is None and not self._read_log():
                return False  # it was killed; the next call starts another one
            self._raise_failure()
        return True

    def fork_engines(self, n: int, timeout: float) -> list[int]:
        """Return the pids of new engines. Raise ClusterError if the server can't load what they need in time."""
        if self.find_server() is None:
            self.start()
        try:
            return self._ask_for_engines(n, timeout)
        except TimeoutError:
            raise ClusterError(
                f"loading torch for the engines took longer than {timeout:g} s; give it longer with timeout="
            ) from None
        except (OSError, ValueError):
            self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        raise ClusterError(
            f"the engines could not be started, because loading torch failed:\n{self._read_log()}"
        ) from None

    def _ask_for_engines(self, n: int, timeout: float) -> list[int]:
        """Ask the server, and another one if it was just being killed: without an error in its log."""
        try:
            return self._send(ForkRequest(n), timeout).engines
        except TimeoutError:
            raise
        except (OSError, ValueError):
            self.wait(timeouts.FORK_REQUEST_TIMEOUT_S)
            if self.find_server() is not None or self._read_log():
                raise
            self.start()
            return self._send(ForkRequest(n), timeout).engines

    def find_server(self) -> int | None:
        """Return the server's pid, or None if it has ended."""
        if self._process is not None:
            return self._process.pid if self._process.poll() is None else None
        with contextlib.suppress(OSError, ValueError):
            return self._send(ForkRequest(0), timeouts.FORK_REQUEST_TIMEOUT_S).server
        return None

    def wait(self, timeout: float) -> None:
        """Wait until the server has ended, if this process started it."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)

    def _send(self, request: ForkRequest, timeout: float) -> ForkReply:
        """Raise OSError or ValueError if the server ends before it replies."""
        with self._ask(request, timeout) as connection:
            return _read_reply(connection)

    def _ask(self, request: ForkRequest, timeout: float) -> socket.socket:
        """Return a connection that gets the reply."""
        connection = connect(self._folder, timeout)
        try:
            connection.sendall(json.dumps(dataclasses.asdict(request)).encode() + b"\n")
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_log(self) -> str:
        return self._log.read_text(errors="replace")[-_MAX_LOG_CHARS:].strip()


def _read_reply(connection: socket.socket) -> ForkReply:
    return ForkReply(**json.loads(connection.makefile().readline()))

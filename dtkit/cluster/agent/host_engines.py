"""The engines of one host, which its agent starts and ends.

The host's fork server (:mod:`dtkit.cluster.forkserver`) forks engines without a GPU. Engines with a GPU, and those of
systems other than Linux, are processes of their own. All of them end with the agent, which its kernel sees to.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.process import ProcessId
from dtkit.cluster.forkserver.client import ForkServerClient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class HostEngines:
    """Engines that this process has started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: ForkServerClient | None = None
        self._forked: list[ProcessId] = []
        self._spawned: list[subprocess.Popen[bytes]] = []

    def load(self, environment: Mapping[str, str], timeout: float) -> bool:
        """Begin to load what engines need. Return whether that is done; this waits for it up to `timeout` seconds.

        Raises ClusterError if it fails.
        """
        _check_thread()
        if not _can_fork(environment):
            return True
        if self._server is None:
            self._server = ForkServerClient(self._folder, environment, ends_with_client=True)
        return self._server.load(timeout)

    def start(self, count: int, environment: Mapping[str, str]) -> list[int]:
        """Start engines, which `load` has prepared, and return their pids."""
        _check_thread()
        self._forked = [engine for engine in self._forked if engine.is_alive]
        self._spawned = [engine for engine in self._spawned if engine.poll() is None]
        if self._server is not None:
            forked = [
                ProcessId.from_pid(pid) for pid in self._server.fork_engines(count, timeouts.FORK_REQUEST_TIMEOUT_S)
            ]
            self._forked += forked
            return [engine.pid for engine in forked]
        logs = self._folder / "log"
        logs.mkdir(mode=0o700, exist_ok=True)
        spawned = [_spawn(environment, logs) for _ in range(count)]
        self._spawned += spawned
        return [engine.pid for engine in spawned]

    def list_pids(self) -> list[int]:
        """Return the pids of engines that run."""
        forked = [engine.pid for engine in self._forked if engine.is_alive]
        return forked + [engine.pid for engine in self._spawned if engine.poll() is None]

    def kill(self, pids: Sequence[int]) -> None:
        """End engines at once, also stopped ones. Other processes are left alone."""
        for engine in self._forked:
            if engine.pid in pids and (process := engine.find()) is not None:
                process.kill()
        for child in self._spawned:
            if child.pid in pids and child.poll() is None:
                child.kill()

    def read_logs(self, max_bytes: int) -> str:
        """Return the end of the newest log that has any text."""
        paths = sorted((self._folder / "log").glob("*engine-*"), key=lambda path: path.stat().st_mtime)
        texts = [path.read_text(errors="replace")[-max_bytes:].strip() for path in reversed(paths)]
        return next((text for text in texts if text), "")


def _can_fork(environment: Mapping[str, str]) -> bool:
    return sys.platform == "linux" and environment.get("CUDA_VISIBLE_DEVICES") == ""


def _check_thread() -> None:
    # The kernel ends the children of a thread with that thread.
    assert threading.current_thread() is threading.main_thread()


def _spawn(environment: Mapping[str, str], logs: Path) -> subprocess.Popen[bytes]:
    with (logs / f"engine-{secrets.token_hex(4)}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dtkit.cluster.agent.engine", str(os.getpid())],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

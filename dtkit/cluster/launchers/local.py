"""Engines on this host."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.cluster.exit_status import read_exit_code
from dtkit.cluster.forkserver.client import ForkServerClient
from dtkit.cluster.launchers.launcher import Launcher, list_with_children
from dtkit.cluster.reaper import MARKER_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.cluster.config import LaunchConfig


class LocalLauncher(Launcher):
    """Starts each engine as a process of its own, out of reach of other hosts."""

    controller_ip = "127.0.0.1"

    def start_engines(self, n: int) -> None:
        """Start engines, without waiting for them to connect."""
        environment = self._config.plan.make_environment(0, self._config.memory_limit)
        for _ in range(n):
            # waits: ipyparallel waits at most 60 s for the connection file
            self._engine_set_ids.append(self._cluster.start_engines_sync(1, environment=environment))

    def stop(self) -> None:
        """Do nothing: the reaper ends all processes of this host."""


class ForkingLauncher(LocalLauncher):
    """Forks engines from a process that loads torch while the controller starts."""

    def __init__(self, config: LaunchConfig, folder: Path) -> None:
        super().__init__(config, folder)
        environment = config.plan.make_environment(0, config.memory_limit)
        self._fork_server = ForkServerClient(
            folder, {**environment, MARKER_VARIABLE: str(folder), "IPP_CLUSTER_ID": "dtkit"}
        )

    def start_controller(self) -> None:
        """Start the fork server, which takes longer, and the controller."""
        self._fork_server.start()
        super().start_controller()

    def start_engines(self, n: int) -> None:
        """Fork engines as soon as torch is loaded, without waiting for them to connect."""
        self._fork_server.fork_engines(n, self._config.timeout)

    def list_pids(self) -> list[int]:
        """Return the pids of this host's processes of the cluster, children included."""
        server = self._fork_server.find_server()
        return super().list_pids() + ([] if server is None else list_with_children([server]))

    def get_exit_code(self, pid: int) -> int | None:
        """Return the exit code that the fork server has noted."""
        return read_exit_code(self._folder, pid)

    def reap(self) -> None:
        """Reap the fork server."""
        self._fork_server.wait(timeouts.KILL_TIMEOUT_S)


def choose_local_launcher(config: LaunchConfig) -> type[LocalLauncher]:
    """Return the launcher for this host. It doesn't fork engines that have a GPU, or on systems other than Linux.

    CUDA can't be used in a process whose parent has used it. Loading torch doesn't, but this is untried on a GPU.
    """
    can_fork = sys.platform == "linux" and all(device == "cpu" for device in config.plan.devices)
    return ForkingLauncher if can_fork else LocalLauncher

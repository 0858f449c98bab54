"""Engines on this host: each one has its own environment, and can be ended by itself."""

from __future__ import annotations

from dtkit.cluster.launchers.launcher import Launcher


class LocalLauncher(Launcher):
    """Starts one set of engines per rank, out of reach of other hosts."""

    controller_ip = "127.0.0.1"

    def start_engines(self, n: int) -> None:
        """Start engines, without waiting for them to connect."""
        environment = self._config.plan.make_environment(0, self._config.memory_limit)
        for _ in range(n):
            # waits: ipyparallel waits at most 60 s for the connection file
            self._engine_set_ids.append(self._cluster.start_engines_sync(1, environment=environment))

    def stop(self) -> None:
        """Leave everything to the reaper, which knows all processes of this host."""

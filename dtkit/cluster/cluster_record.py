"""Upkeep of the cluster file while this notebook owns the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

from dtkit._util.process import ProcessId
from dtkit.cluster.cluster_file import ClusterInfo, read_cluster_file

if TYPE_CHECKING:
    from dtkit.cluster.launched_transport import LaunchedTransport
    from dtkit.rpc.membership import GroupConfig


class ClusterRecord:
    """The cluster file of this notebook's cluster, kept up to date: an `OwnerRecord` of its engine group."""

    def __init__(self, transport: LaunchedTransport, config: GroupConfig, started_at: float, environment: str) -> None:
        """`environment` is the folder of the engines' Python environment."""
        self._transport, self._config, self._started_at = transport, config, started_at
        self._environment = environment
        # locks: while a few hundred bytes are written
        self._lock, self._is_written = threading.Lock(), False
        transport.on_refill = self._write_after_refill

    @property
    def is_superseded(self) -> bool:
        """Whether another notebook has taken the cluster over."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return read_cluster_file(self._transport.folder).owner > self._config.owner_id
        return False

    def write(self) -> None:
        """Record this notebook as the owner of the present engines."""
        with self._lock:
            self._make_info().write()
            self._is_written = True

    def restore(self, former: ClusterInfo) -> None:
        """Record the former owner again, unless a third notebook has taken the cluster over."""
        with self._lock, contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            self._is_written = False
            info = read_cluster_file(self._transport.folder)
            if info.owner == self._config.owner_id:
                dataclasses.replace(
                    info, owner=former.owner, notebook=former.notebook, directory=former.directory
                ).write()

    def _write_after_refill(self) -> None:
        """Record new spare engines; otherwise a notebook that takes over would start others."""
        if self._is_written and not self.is_superseded:
            with contextlib.suppress(OSError):  # the cluster was closed, or the disk is full
                self.write()

    def _make_info(self) -> ClusterInfo:
        transport, config = self._transport, self._config
        return ClusterInfo(
            folder=transport.folder,
            owner=config.owner_id,
            notebook=ProcessId.from_pid(),
            reaper=transport.reaper,
            engine_ids=tuple(transport.engine_ids),
            spare_ids=tuple(transport.spare_ids),
            started_at=self._started_at,
            launch_config=dataclasses.asdict(transport.config),
            step_timeout=config.step_timeout,
            interface=config.interface,
            environment=self._environment,
        )

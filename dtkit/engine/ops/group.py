"""Ownership of the engine, and its process group."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.resources import count_cores
from dtkit.engine import memory_limit, node_info, warmup
from dtkit.engine.observe.system_monitor import MONITOR
from dtkit.engine.ops.admission import check_not_older
from dtkit.messages import EngineInventory
from dtkit.rpc.clocks import ClockReading
from dtkit.rpc.handshake import get_handshake
from dtkit.rpc.protocol import GroupOperations

if TYPE_CHECKING:
    from dtkit._util.process import ProcessId
    from dtkit.engine.ops.state import EngineState
    from dtkit.messages import EngineDescription, GroupSpec


class GroupOps(GroupOperations):
    """See :class:`~dtkit.rpc.protocol.GroupOperations`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def handshake(self) -> dict[str, object]:
        """Return versions, host and import path."""
        return get_handshake()

    def acquire_ownership(self, *, owner: int) -> EngineInventory:
        """Belong to another notebook from now on, and keep everything. Return the engine's inventory."""
        state = self._state
        check_not_older(owner, state.owner)
        state.owner = owner
        generation = -1 if state.spec is None else state.spec.generation
        return EngineInventory(state.rank, generation, {key: job.step for key, job in state.jobs.items()})

    def return_ownership(self, *, owner: int) -> None:
        """Belong to the former notebook again."""
        self._state.owner = owner

    def join_group(
        self,
        *,
        spec: GroupSpec,
        owner: int,
        file_owner: ProcessId | None,
        step_timeout: float | None,
        ranks_changed: bool = False,
    ) -> EngineDescription:
        """Form the process group. If ranks have changed, all jobs end."""
        warmup.load_torch()
        import torch

        from dtkit.engine import checks, memory
        from dtkit.engine.comm.host_link import has_other_hosts
        from dtkit.engine.comm.process_group import Group

        state = self._state
        check_not_older(owner, state.owner)
        if owner != state.owner:
            state.release_all()
        state.owner, state.file_owner, state.step_timeout = owner, file_owner, step_timeout
        had_group = state.group is not None
        state.close_group()
        vars(sys).pop("ps1", None)  # Lightning refuses to start its DDP in a process that has IPython's prompt
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        state.device = torch.device(spec.device)
        if state.device.type == "cuda":
            torch.cuda.set_device(state.device)
        state.spec = spec
        checks.check_folder_writable(state.cluster_folder)
        MONITOR.has_other_hosts = has_other_hosts(spec)
        state.watchdog.start(spec)
        state.group = Group(spec, memory_limit.lift_data_limit)
        state.watchdog.watch_links(state.group.connections.list_links)
        state.set_collective_timeout(step_timeout or timeouts.FIRST_STEP_TIMEOUT_S)
        state.run_abortable(lambda: self._rebind_jobs(ranks_changed=ranks_changed))
        if had_group:  # reference cycles keep the old group's threads and connections
            memory.release_unused_memory()
        return self.node_info()

    def _rebind_jobs(self, *, ranks_changed: bool) -> None:
        """Let jobs continue in the new group, or end them.

        A job that is missing on some rank ends on the others too, because they would wait for that rank.
        """
        jobs, group = self._state.jobs, self._state.get_group()
        shared = [name for name, job in jobs.items() if job.context.group is not None]
        ended = set(jobs) if ranks_changed else set(shared) - group.intersect_names(shared)
        for name in ended:
            self._state.close_job(name)
        for job in jobs.values():
            job.set_process_group(group)

    def leave_group(self) -> None:
        """Leave the group and free everything."""
        self._state.watchdog.stop()
        self._state.close_group()
        self._state.release_all()

    def node_info(self) -> EngineDescription:
        """Return the engine's row of the cluster's table."""
        import torch

        device = self._state.get_device()
        total, free = node_info.read_device_memory(device)
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device),
            "memory_total": total,
            "memory_free": free,
            "threads": torch.get_num_threads(),
            "cores": count_cores(),
        }

    def read_clock(self, *, rounds: int = 9) -> list[ClockReading]:
        """Return the engine's clocks before and after several barriers."""
        readings = []
        for _ in range(rounds):
            begin = time.perf_counter()
            # waits: a collective, limited by the process group's timeout
            self._state.get_group().barrier()
            readings.append(ClockReading(begin, time.perf_counter(), time.time()))
        return readings

    def warm_up(self) -> None:
        """Load what the first step needs, then activate the memory limit."""
        try:
            warmup.preload()
        finally:  # also after an interrupt, which is meant for the call that waits behind this one
            self._state.memory_limit.activate(self._state.get_device())

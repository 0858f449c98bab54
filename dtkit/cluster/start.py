"""Three ways to get a ready engine group: start engines, use running ones, or take over a cluster's."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit._util import formatting, timeouts
from dtkit._util.process import ProcessId
from dtkit.cluster.cluster_record import ClusterRecord
from dtkit.cluster.launched_transport import LaunchedTransport
from dtkit.dashboard.text.progress import show_progress
from dtkit.errors import DtkitError
from dtkit.rpc import shared_memory
from dtkit.rpc.cluster_folder import ClusterFolder
from dtkit.rpc.engine_group import EngineGroup
from dtkit.rpc.membership import GroupConfig
from dtkit.rpc.protocol import GroupOperations, make_call

if TYPE_CHECKING:
    from dtkit.cluster.cluster_file import ClusterInfo
    from dtkit.cluster.config import LaunchConfig
    from dtkit.cluster.devices import DevicePlan
    from dtkit.messages import EngineInventory
    from dtkit.rpc.transport import Transport


def start_engines(
    config: LaunchConfig, *, step_timeout: float | None, interface: str | None
) -> tuple[EngineGroup, DevicePlan]:
    """Start engines on this host, or wherever the launcher starts them. Return them with their devices."""
    shared_memory.remove_orphans()
    n = len(config.plan.devices)
    engines = formatting.format_count(n, "engine")
    with show_progress(f"starting {engines}") as progress:
        transport = LaunchedTransport.start(n, config, progress.update)
        progress.update(f"loading torch on {engines}")
        group = _make_launched_group(transport, step_timeout, interface, time.time(), sys.prefix)
        return _connect(group), transport.config.plan


def use_engines(
    transport: Transport,
    plan: DevicePlan,
    *,
    timeout: float = timeouts.CLUSTER_TIMEOUT_S,
    step_timeout: float | None = None,
    interface: str | None = None,
    folder: str | Path | None = None,
) -> EngineGroup:
    """Use engines that somebody else started, or those of a test double. They meet in `folder`."""
    config = _make_group_config(plan, ProcessId.from_pid(), timeout, step_timeout, interface)
    return _connect(EngineGroup(transport, ClusterFolder(_make_folder(folder)), config))


def _connect(group: EngineGroup) -> EngineGroup:
    try:
        group.membership.handshake()
        group.membership.form_process_group()
        group.record_owner()
        group.fan_out(make_call(GroupOperations.warm_up))  # so that the first step needn't wait for it
    except BaseException:
        group.close()
        raise
    return group


def reattach(info: ClusterInfo) -> tuple[EngineGroup, list[EngineInventory]]:
    """Take over a cluster's engines. Return them with the inventory of each."""
    transport = LaunchedTransport.reattach(info)
    group = _make_launched_group(transport, info.step_timeout, info.interface, info.started_at, info.environment)
    membership = group.membership
    try:
        inventories = membership.acquire_ownership()
        lost_ranks = membership.find_lost_ranks()
        membership.handshake([rank for rank in range(group.world_size) if rank not in lost_ranks])
        if not lost_ranks:
            membership.form_process_group()
        group.record_owner()
    except BaseException:
        undo_reattach(group, info)
        raise
    return group, inventories


def undo_reattach(group: EngineGroup, former: ClusterInfo) -> None:
    """Return a cluster that could not be taken over to its former owner."""
    try:
        if former.is_owned:  # otherwise nobody will call the engines
            with contextlib.suppress(DtkitError):  # the former owner's calls are then refused
                group.membership.return_ownership(former.owner)
    finally:
        assert isinstance(group.owner_record, ClusterRecord)
        group.owner_record.restore(former)
        group.detach()


def _make_launched_group(
    transport: LaunchedTransport,
    step_timeout: float | None,
    interface: str | None,
    started_at: float,
    environment: str,
) -> EngineGroup:
    launch_config = transport.config
    config = _make_group_config(launch_config.plan, transport.reaper, launch_config.timeout, step_timeout, interface)
    record = ClusterRecord(transport, config, started_at, environment)
    return EngineGroup(transport, ClusterFolder(transport.folder), config, record)


def _make_group_config(
    plan: DevicePlan, file_owner: ProcessId, timeout: float, step_timeout: float | None, interface: str | None
) -> GroupConfig:
    return GroupConfig(
        file_owner=file_owner,
        devices=plan.devices,
        backend=plan.backend,
        threads=plan.threads,
        timeout=timeout,
        step_timeout=step_timeout,
        interface=interface,
    )


def _make_folder(location: str | Path | None) -> Path:
    """Create a folder that only this user can enter, in `location` or among this host's temporary folders."""
    parent = Path(tempfile.gettempdir() if location is None else location).expanduser().absolute()
    try:
        return Path(tempfile.mkdtemp(prefix="dtkit-", dir=parent))
    except OSError as error:
        raise ValueError(
            f"folder={str(parent)!r}: {error.strerror}. It must be one that the notebook and all engines can write to"
        ) from None

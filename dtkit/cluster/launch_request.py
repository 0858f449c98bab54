"""Checking a user's request for a cluster, and making its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.devices import (
    DevicePlan,
    check_devices,
    choose_num_engines,
    plan_devices,
    warn_of_too_many_engines,
)
from dtkit.cluster.launchers.launcher import check_launcher

if TYPE_CHECKING:
    from dtkit.cluster.launchers.hosts import HostLauncher


def make_config(n: int | None, launcher: str, device: str, threads: int | None, **common: Any) -> LaunchConfig:
    """Check the request, and return the configuration of engines on this host."""
    check_launcher(launcher)
    plan = plan_devices(choose_num_engines(n, launcher), device, threads)
    if launcher == "local" and threads is None:
        warn_of_too_many_engines(plan)
    return LaunchConfig(launcher, plan, **common)


def make_host_config(
    n: int | None, launcher: HostLauncher, device: str, threads: int | None, **common: Any
) -> LaunchConfig:
    """Check the request, and return the configuration of engines on several hosts.

    Devices are chosen later, when the hosts have answered.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"Cluster({n!r}, launcher={launcher.name}): say how many engines, as in Cluster(8, ...)")
    check_devices(device, threads)
    launcher.list_hosts(n)  # raises if there are too many engines
    plan = DevicePlan(("cpu",) * n, threads, "gloo")
    return LaunchConfig(launcher.name, plan, hosts=launcher.to_json(), device=device, **common)

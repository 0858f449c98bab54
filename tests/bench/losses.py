"""Seconds until a run tells what happened on another host, on hosts in namespaces. Needs root, SSH and Slurm."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import dtkit
from tests.support.hosts.network import Network, make_network
from tests.support.hosts.slurm import Slurm, start_slurm
from tests.support.hosts.ssh import start_ssh
from tests.support.hosts.training import train
from tests.support.recovery import wait_for_step
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_S = 10.0
_STEPS = 1_000_000


def losses() -> bool:
    """Print the seconds from each fault to the run's line on it, with that line."""
    with make_network(3) as network:
        config = start_ssh(network)
        launcher = dtkit.SSH(["host1:1", "host2:1"], python=sys.executable, ssh_options=["-F", str(config)])
        seconds = [measure(network, launcher, name, fault) for name, fault in FAULTS.items()]
        with start_slurm(network) as slurm:
            os.environ["SLURM_CONF"] = str(slurm.config)
            os.environ["HOME"] = str(network.folder)
            seconds.append(measure(network, dtkit.Slurm(nodes=2), "scancel", lambda *_: cancel_jobs(slurm)))
    return max(seconds) <= MOST_S


def measure(
    network: Network,
    launcher: dtkit.SSH | dtkit.Slurm,
    name: str,
    fault: Callable[[Network, dtkit.Cluster], None],
) -> float:
    """Disturb a training on two hosts once, and repair the network."""
    with dtkit.Cluster(2, launcher=launcher, device="cpu", threads=1) as cluster:
        run = train(cluster, _STEPS, on_failure="pause")
        wait_for_step(run, 50)
        begin = time.time()
        fault(network, cluster)
        event = wait_until(lambda: next((e for e in run.history.events if e.kind == "lost"), None))
        print(f"  {name}: {event.time - begin:.2f} s: {event.text}", flush=True)
        if name == "cut link":
            network.repair()
    network.repair()
    return float(event.time - begin)


def kill_engine(network: Network, cluster: dtkit.Cluster) -> None:
    """End an engine's process."""
    network["host2"].run("kill", "-9", str(cluster.nodes[1].pid))


def kill_agent(network: Network, cluster: dtkit.Cluster) -> None:
    """End the agent's process, and with it the engine's."""
    (agent,) = [a for a in cluster._engine_group.transport._launcher.agents if a.info.host == "host2"]
    network["host2"].run("kill", "-9", str(agent.info.pid))


def cancel_jobs(slurm: Slurm) -> None:
    """Cancel all jobs."""
    slurm.call("scancel", *slurm.list_jobs())


FAULTS: dict[str, Callable[[Network, dtkit.Cluster], None]] = {
    "killed engine": kill_engine,
    "killed agent": kill_agent,
    "cut link": lambda network, _: network["host2"].cut(),
    "power off": lambda network, _: network["host2"].power_off(),
}

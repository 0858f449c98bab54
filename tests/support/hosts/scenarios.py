"""What each launcher's cluster on several hosts must do: train exactly, lose an engine or an agent, be interrupted."""

from __future__ import annotations

import dataclasses
import signal
import threading
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from dtkit.engine.comm.host_store import HostStore
from dtkit.errors import ClusterError
from tests.support.hosts.training import assert_exact, train, train_slowly
from tests.support.ports import list_mechanisms
from tests.support.recovery import list_loss_events, wait_for_step

if TYPE_CHECKING:
    import dtkit
    from tests.support.hosts.network import Network

SERVICES = ("mpirun", "orted", "slurmd", "slurmstepd", "srun", "sshd")
"""Programs of Open MPI, Slurm and SSH. They listen on all addresses, as docs/guides/security.md says."""
MEMORY_FOLDERS = ("/dev/shm", "/tmp")
"""Folders of a host in which data may be kept."""
LONG = 300
"""Slow steps of a training that a test disturbs."""


def check_training(cluster: dtkit.Cluster, network: Network) -> None:
    """Train as one process would, while nothing listens wider than it has to."""
    run = train(cluster)
    run.wait(60)
    assert_exact(run)
    assert run.verify(5).verdict == "PASS"
    check_ports(cluster, network)
    check_store(cluster)


def check_ports(cluster: dtkit.Cluster, network: Network) -> None:
    """Check that hosts listen on loopback and one address each, and this machine on the controller's, with a key."""
    launcher = cluster._engine_group.transport._launcher
    for agent in launcher.agents:
        sockets = network[agent.info.hostname].list_listening()
        own = {(name, address) for name, address in sockets if name not in SERVICES}
        assert {address for _, address in own} == {"127.0.0.1", agent.info.address}
    here = set()
    for process in [psutil.Process(), *map(psutil.Process, launcher.list_pids())]:
        if process.name() not in SERVICES:
            here |= {tuple(c.laddr) for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    assert {address for address, _ in here} <= {"127.0.0.1", launcher.controller_ip}
    mechanisms = list_mechanisms([place for place in here if place[0] == launcher.controller_ip])
    assert set(mechanisms.values()) == {b"CURVE"}


def check_store(cluster: dtkit.Cluster) -> None:
    """Check that the store, at which the ranks meet, refuses another key."""
    first, generation = cluster._engine_group.transport._launcher.agents[0], cluster._engine_group.membership.generation
    place = first.call("open_store", address=first.info.address, generation=generation)
    with pytest.raises(ConnectionError, match="refused this cluster's key"):
        HostStore(dataclasses.replace(place, key=bytes(32)), timeout_s=5.0)
    HostStore(place, timeout_s=5.0).close()


def check_lost_engine(cluster: dtkit.Cluster, network: Network) -> None:
    """Kill the last rank's engine during a training: another one on its host takes its place."""
    run, hosts = train_slowly(cluster, LONG), [node.host for node in cluster.nodes]
    wait_for_step(run, 50)
    network[hosts[-1]].run("kill", "-9", str(cluster.nodes[-1].pid))
    check_recovered(run, cluster, hosts)


def check_lost_agent(cluster: dtkit.Cluster, network: Network) -> None:
    """Kill the last host's agent during a training: another one on that host takes its place."""
    run, hosts = train_slowly(cluster, LONG), [node.host for node in cluster.nodes]
    wait_for_step(run, 50)
    (agent,) = [a for a in cluster._engine_group.transport._launcher.agents if a.info.host == hosts[-1]]
    network[hosts[-1]].run("kill", "-9", str(agent.info.pid))
    check_recovered(run, cluster, hosts)


def check_recovered(run: dtkit.Run, cluster: dtkit.Cluster, hosts: list[str]) -> None:
    """Check that a disturbed run ends as an undisturbed one, with its engines on these hosts."""
    run.wait(120)
    assert [node.host for node in cluster.nodes] == hosts
    assert list_loss_events(run) == ["lost", "repair"]
    assert find_event(run, " slow: ") == ""
    assert_exact(run)


def check_full_memory(cluster: dtkit.Cluster, network: Network) -> None:
    """Take the room for data from the first host: the error names it, and the cluster goes on."""
    host = network[cluster.nodes[0].host]
    for folder in MEMORY_FOLDERS:
        host.run("mount", "-o", "remount,size=8M", folder)  # engines keep some data of runs that have ended
    try:
        with pytest.raises(ClusterError, match=rf"{host.name}: OSError: .*no room for 24 MB of data"):
            cluster.partition(np.zeros(2_000_000))
    finally:
        for folder in MEMORY_FOLDERS:
            host.run("mount", "-o", "remount,size=50%", folder)
    assert cluster.run(lambda: 1) == [1] * cluster.world_size


def find_event(run: dtkit.Run, text: str) -> str:
    """Return the text of the run's event that contains a text, or nothing."""
    return next((event.text for event in run.history.events if text in event.text), "")


def check_interrupt(cluster: dtkit.Cluster) -> None:
    """Interrupt a training: it pauses between two steps, and goes on."""
    run = train_slowly(cluster, 100_000)
    wait_for_step(run, 50)
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    timer.join()
    assert run.status.state.name == "PAUSED"
    step = run.status.step
    run.step(10)
    assert run.status.step == step + 10
    run.stop()
    assert_exact(run)

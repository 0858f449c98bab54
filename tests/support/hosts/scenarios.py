"""What each launcher's cluster on several hosts must do: train exactly, lose an engine or an agent, be interrupted."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts.training import assert_exact, train
from tests.support.recovery import list_loss_events, wait_for_step

if TYPE_CHECKING:
    import dtkit
    from tests.support.hosts.network import Network

LONG = 1500
"""Steps of a training that a test disturbs."""


def check_training(cluster: dtkit.Cluster, network: Network) -> None:
    """Train as one process would, while nothing on any host listens on more than one address."""
    run = train(cluster)
    run.wait(60)
    assert_exact(run)
    assert run.verify(5).verdict == "PASS"
    for host in {node.host for node in cluster.nodes}:
        listening = [line for line in network[host].run("ss", "-Hlntp").splitlines() if "python" in line]
        assert listening
        assert not [line for line in listening if line.split()[3].startswith(("0.0.0.0:", "[::]:", "*:"))]


def check_lost_engine(cluster: dtkit.Cluster, network: Network) -> None:
    """Kill the last rank's engine during a training: another one on its host takes its place."""
    run, hosts = train(cluster, LONG), [node.host for node in cluster.nodes]
    wait_for_step(run, 50)
    network[hosts[-1]].run("kill", "-9", str(cluster.nodes[-1].pid))
    check_recovered(run, cluster, hosts)


def check_lost_agent(cluster: dtkit.Cluster, network: Network) -> None:
    """Kill the last host's agent during a training: another one on that host takes its place."""
    run, hosts = train(cluster, LONG), [node.host for node in cluster.nodes]
    wait_for_step(run, 50)
    (agent,) = [a for a in cluster._engine_group.transport._launcher.agents if a.info.host == hosts[-1]]
    network[hosts[-1]].run("kill", "-9", str(agent.info.pid))
    check_recovered(run, cluster, hosts)


def check_recovered(run: dtkit.Run, cluster: dtkit.Cluster, hosts: list[str]) -> None:
    """Check that a disturbed run ends as an undisturbed one, with its engines on these hosts."""
    run.wait(120)
    assert [node.host for node in cluster.nodes] == hosts
    assert list_loss_events(run) == ["lost", "repair"]
    assert_exact(run)


def check_interrupt(cluster: dtkit.Cluster) -> None:
    """Interrupt a training: it pauses between two steps, and goes on."""
    run = train(cluster, 100_000)
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

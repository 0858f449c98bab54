"""Training on hosts whose agents ``mpirun`` started: Open MPI over real SSH servers, in namespaces."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

import dtkit
from tests.support.hosts import network as networks
from tests.support.hosts.training import assert_exact, assert_nothing_left, make_mpi, train
from tests.support.recovery import list_loss_events, wait_for_step
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.hosts.network import Network

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def start(ssh_config: Path, network: Network, runtime: Path) -> Iterator[Callable[..., dtkit.Cluster]]:
    """Start a cluster on two hosts, and check at the end that nothing of it is left, here or there."""
    networks.require("mpirun")

    def start(n: int = 4, hosts: tuple[str, ...] = ("host1:2", "host2:2")) -> dtkit.Cluster:
        return dtkit.Cluster(n, launcher=make_mpi(network, ssh_config, hosts), device="cpu", threads=1)

    yield start
    assert_nothing_left(network)
    wait_until(lambda: not list(runtime.glob("dtkit-*")), 30)
    wait_until(lambda: not [child for child in psutil.Process().children(True) if child.name() == "mpirun"], 30)


def test_training_is_exact_survives_a_lost_engine_and_an_interrupt(
    start: Callable[..., dtkit.Cluster], network: Network
):
    with start() as cluster:
        assert [node.host for node in cluster.nodes] == ["host1", "host1", "host2", "host2"]
        run = train(cluster)
        run.wait(60)
        assert_exact(run)
        assert run.verify(5).verdict == "PASS"

        run = train(cluster, 3000)
        wait_for_step(run, 50)
        network["host2"].run("kill", "-9", str(cluster.nodes[3].pid))
        run.wait(120)
        assert [node.host for node in cluster.nodes] == ["host1", "host1", "host2", "host2"]
        assert list_loss_events(run) == ["lost", "repair"]
        assert_exact(run)

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


def test_lost_agent_is_replaced_by_a_further_mpirun(start: Callable[..., dtkit.Cluster], network: Network):
    with start(2, ("host1:1", "host2:1")) as cluster:
        run = train(cluster, 3000)
        wait_for_step(run, 50)
        (agent,) = [a for a in cluster._engine_group.transport._launcher.agents if a.info.host == "host2"]
        network["host2"].run("kill", "-9", str(agent.info.pid))
        run.wait(120)
        assert [node.host for node in cluster.nodes] == ["host1", "host2"]
        assert list_loss_events(run) == ["lost", "repair"]
        assert_exact(run)

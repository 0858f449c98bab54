"""Training on hosts whose agents ``mpirun`` started: Open MPI over real SSH servers, in namespaces."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil
import pytest

import dtkit
from tests.support.hosts import network as networks
from tests.support.hosts import scenarios
from tests.support.hosts.training import assert_nothing_left, make_mpi
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

    def start(hosts: tuple[str, ...] = ("host1:1", "host2:1"), **options: str) -> dtkit.Cluster:
        launcher = make_mpi(network, ssh_config, hosts, **options)
        return dtkit.Cluster(2, launcher=launcher, device="cpu", threads=1)

    yield start
    assert_nothing_left(network)
    wait_until(lambda: not list(runtime.glob("dtkit-*")), 30)
    wait_until(lambda: not [child for child in psutil.Process().children(True) if child.name() == "mpirun"], 30)


def test_training_is_exact_survives_losses_and_an_interrupt(start: Callable[..., dtkit.Cluster], network: Network):
    with start() as cluster:
        assert [node.host for node in cluster.nodes] == ["host1", "host2"]
        scenarios.check_training(cluster, network)
        scenarios.check_full_memory(cluster, network)
        scenarios.check_lost_engine(cluster, network)
        scenarios.check_interrupt(cluster)
        scenarios.check_lost_agent(cluster, network)  # a further mpirun starts another one


def test_hosts_without_ipv4_train_and_replace_an_engine(start: Callable[..., dtkit.Cluster], network: Network):
    with contextlib.ExitStack() as stack:
        for host in network.hosts[:2]:
            host.use_only_ipv6()
            stack.callback(host.use_ipv4_too)
        with start(("host1-by-ipv6:1", "host2-by-ipv6:1"), address=network.address6) as cluster:
            launcher = cluster._engine_group.transport._launcher
            assert launcher.controller_ip == network.address6
            assert [agent.info.address for agent in launcher.agents] == [host.address6 for host in network.hosts[:2]]
            scenarios.check_training(cluster, network)
            scenarios.check_lost_engine(cluster, network)

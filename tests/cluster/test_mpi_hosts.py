"""Training on hosts whose agents ``mpirun`` started: Open MPI over real SSH servers, in namespaces."""

from __future__ import annotations

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

    def start(**options: str) -> dtkit.Cluster:
        launcher = make_mpi(network, ssh_config, ("host1:1", "host2:1"), **options)
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


def test_agents_and_engines_reach_a_notebook_that_has_only_ipv6(start: Callable[..., dtkit.Cluster], network: Network):
    with start(address=network.address6) as cluster:
        launcher = cluster._engine_group.transport._launcher
        assert launcher.controller_ip == network.address6
        scenarios.check_training(cluster, network)
        scenarios.check_interrupt(cluster)
        scenarios.check_lost_engine(cluster, network)

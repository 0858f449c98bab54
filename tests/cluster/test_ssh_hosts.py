"""Engines on several hosts by SSH: real servers, in namespaces with their own network, hostname and shared memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import dtkit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.hosts.network import Network

pytestmark = [pytest.mark.cluster]


@pytest.fixture
def start(ssh_config: Path) -> Callable[..., dtkit.Cluster]:
    """Start a cluster on two hosts."""

    def start(n: int = 2, hosts: tuple[str, ...] = ("host1:2", "host2:2"), **options: object) -> dtkit.Cluster:
        launcher = dtkit.SSH(hosts, python=sys.executable, ssh_options=["-F", str(ssh_config)])
        return dtkit.Cluster(n, launcher=launcher, device="cpu", threads=1, **options)

    return start


def test_engines_run_on_the_hosts_that_were_asked_for(start: Callable[..., dtkit.Cluster], network: Network):
    with start(3) as cluster:
        assert [node.host for node in cluster.nodes] == ["host1", "host1", "host2"]

"""Engines on hosts as jobs of PBS: its own commands, which Debian's slurm-wlm-torque has, on a real Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dtkit
from tests.support.hosts import network as networks
from tests.support.hosts import scenarios
from tests.support.hosts.training import assert_nothing_left
from tests.support.waiting import ends_soon, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.hosts.network import Network
    from tests.support.hosts.slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WHOLE_HOSTS = """\
#!/bin/bash
#PBS -V
#PBS -j oe
#PBS -o {output_file}
#PBS -l nodes=1:ppn=4
{program_and_args}
"""


@pytest.fixture
def start(slurm: Slurm, network: Network, home: Path, runtime: Path) -> Iterator[Callable[..., dtkit.Cluster]]:
    """Start a cluster on two hosts, and check at the end that nothing of it is left."""
    networks.require("qsub", "qstat", "qdel")

    def start(**options: Any) -> dtkit.Cluster:
        launcher = dtkit.Batch("PBS", nodes=2, **{"address": network.address, "template": WHOLE_HOSTS} | options)
        return dtkit.Cluster(2, launcher=launcher, device="cpu", threads=1)

    yield start
    wait_until(lambda: not slurm.list_jobs(), 30)
    assert_nothing_left(network)
    wait_until(lambda: not list(runtime.glob("dtkit-*")), 30)
    assert list((home / ".cache" / "dtkit").iterdir()) == []


def test_training_is_exact_and_a_lost_agent_is_replaced_by_a_further_job(
    start: Callable[..., dtkit.Cluster], network: Network
):
    with start() as cluster:
        scenarios.check_training(cluster, network)
        scenarios.check_full_memory(cluster, network)
        scenarios.check_lost_engine(cluster, network)
        scenarios.check_lost_agent(cluster, network)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "/no/python"}, r"PBS job \d+ has ended. It printed: .*/no/python: No such file.*Name the Python"),
        ({"queue": "nope", "template": None}, r"PBS refused the job: .*invalid partition specified: nope"),
    ],
    ids=["no Python", "queue"],
)
def test_wrong_request(start: Callable[..., dtkit.Cluster], options: dict[str, Any], message: str):
    with ends_soon(), pytest.raises(dtkit.errors.ClusterError, match=message):
        start(**options)


def test_address_that_the_hosts_do_not_reach_is_told_soon(start: Callable[..., dtkit.Cluster]):
    message = r"PBS job \d+: host\d can't reach .* 127\.0\.0\.1, port \d+: .*address="
    with ends_soon(), pytest.raises(dtkit.errors.ClusterError, match=message):
        start(address="127.0.0.1")

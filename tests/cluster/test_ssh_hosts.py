"""Engines on several hosts by SSH: real servers, in namespaces with their own network, hostname and shared memory."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from tests.support.hosts import scenarios
from tests.support.hosts.host import run as run_here
from tests.support.hosts.processes import list_commands
from tests.support.hosts.training import assert_exact, assert_nothing_left, train
from tests.support.recovery import list_loss_events, wait_for_step
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.hosts.network import Network

pytestmark = pytest.mark.cluster
NOTICED_S = 30.0
"""Limit for a loss to be noticed and repaired on a machine with load."""


@pytest.fixture
def start(ssh_config: Path) -> Callable[..., dtkit.Cluster]:
    """Start a cluster on hosts of the network."""

    def start(n: int = 2, hosts: tuple[str, ...] = ("host1:2", "host2:2"), **options: Any) -> dtkit.Cluster:
        python = options.pop("python", sys.executable)
        launcher = dtkit.SSH(hosts, python=python, ssh_options=options.pop("ssh", ["-F", str(ssh_config)]))
        return dtkit.Cluster(n, launcher=launcher, device="cpu", threads=1, **options)

    return start


def test_hosts_train_exactly_lose_an_engine_and_are_left_clean(start: Callable[..., dtkit.Cluster], network: Network):
    with start(3) as cluster:
        assert [node.host for node in cluster.nodes] == ["host1", "host1", "host2"]
        scenarios.check_training(cluster, network)
        killed = cluster.nodes[2]
        network["host2"].run("kill", "-9", str(killed.pid))
        wait_until(lambda: cluster._engine_group.membership.find_lost_ranks() == [2])
        assert cluster.repair() == [2]
        assert cluster.nodes[2].host == "host2"
        assert cluster.nodes[2].pid != killed.pid
        rows = cluster.partition(np.zeros((1000, 1000)))
        assert sum(rows.sizes) == 1000
    assert_nothing_left(network)


@pytest.mark.slow
def test_a_killed_agent_is_replaced_and_an_interrupt_pauses(start: Callable[..., dtkit.Cluster], network: Network):
    with start(2, ("host1:1", "host2:1")) as cluster:
        scenarios.check_lost_agent(cluster, network)
        scenarios.check_interrupt(cluster)
    assert_nothing_left(network)


@pytest.mark.slow
def test_training_shrinks_when_a_host_loses_its_power(start: Callable[..., dtkit.Cluster], network: Network):
    with start(2, ("host1:1", "host2:1")) as cluster:
        run = train(cluster, scenarios.LONG, on_failure="shrink")
        wait_for_step(run, 50)
        network["host2"].power_off()
        run.wait(120)
        assert [node.host for node in cluster.nodes] == ["host1"]
        assert_exact(run)
    assert_nothing_left(network)


@pytest.mark.slow
def test_a_cut_within_the_grace_does_no_harm_and_a_longer_one_ends_the_engines(
    start: Callable[..., dtkit.Cluster], network: Network
):
    host = network["host2"]
    with start(2, ("host1:1", "host2:1")) as cluster:
        pids = [node.pid for node in cluster.nodes]
        run = train(cluster, scenarios.LONG, on_failure="shrink")
        wait_for_step(run, 50)
        host.cut()
        wait_until(lambda: run.status.step is not None)
        host.restore()
        run.wait(120)
        assert [node.pid for node in cluster.nodes] == pids
        assert_exact(run)
        run = train(cluster, scenarios.LONG, on_failure="shrink")
        wait_for_step(run, 50)
        host.cut()
        run.wait(120)
        assert [node.host for node in cluster.nodes] == ["host1"]
        assert_exact(run)
        host.restore()
        wait_until(lambda: not list_commands(network, [host]), NOTICED_S)


@pytest.mark.slow
def test_clocks_of_hosts_are_compared_so_that_the_timeline_is_one(start: Callable[..., dtkit.Cluster]):
    with start(2, ("host1:1", "host2:1")) as cluster:
        assert_one_timeline(cluster)
        assert "clock" not in repr(cluster)


@pytest.mark.slow
def test_a_link_of_two_megabits_a_second_does_no_harm(start: Callable[..., dtkit.Cluster], network: Network):
    with start(2, ("host1:1", "host2:1")) as cluster:
        run = train(cluster, scenarios.LONG)
        wait_for_step(run, 50)
        network["host2"].throttle(2)
        wait_for_step(run, 150)
        run.stop()
        assert list_loss_events(run) == []
        assert_exact(run)


@pytest.mark.slow
def test_a_slow_link_does_no_harm_and_is_told(start: Callable[..., dtkit.Cluster], network: Network):
    try:
        network["host2"].slow_down(30)
    except RuntimeError as error:
        pytest.skip(f"this kernel can't delay a link: {error}")
    with start(2, ("host1:1", "host2:1")) as cluster:
        assert_one_timeline(cluster)
        assert re.search(r"Timelines of host2 are exact to \d+ ms only", repr(cluster))


def assert_one_timeline(cluster: dtkit.Cluster) -> None:
    """Check the clocks of two hosts, of which the second one's is 1,000 s ahead, and a training."""
    clocks = cluster._engine_group.membership.clocks
    assert clocks is not None
    assert abs(clocks.offsets[1] - 1000) <= clocks.errors[1] <= 0.5
    run = train(cluster, 20)
    run.wait(60)
    assert_exact(run)
    spans = run.timeline.spans
    assert set(spans["rank"].tolist()) == {0, 1}
    assert spans["end"].max() - spans["begin"].min() < 60


@pytest.mark.slow
def test_attach_finds_the_hosts_after_a_kernel_ends(
    start: Callable[..., dtkit.Cluster], ssh_config: Path, network: Network
):
    code = f"""
import sys, dtkit, threading
from tests.support.hosts import training
launcher = dtkit.SSH(["host1:1", "host2:1"], python={sys.executable!r}, ssh_options=["-F", {str(ssh_config)!r}])
cluster = dtkit.Cluster(2, launcher=launcher, device="cpu", threads=1, lease=60)
run = training.train(cluster, 4000)
started = threading.Event()
run.subscribe(lambda: run.status.step > 50 and started.set())
started.wait(60)
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as kernel:
        assert kernel.stdout is not None
        assert "ready" in kernel.stdout.readline()
        kernel.kill()
    with dtkit.attach() as cluster:
        assert [node.host for node in cluster.nodes] == ["host1", "host2"]
        run = cluster.current_run
        assert run is not None
        run.resume()
        run.wait(120)
        assert_exact(run)
    assert_nothing_left(network)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "options", "message"),
    [
        (("host9:1",), {}, r"host9: .*[Cc]ould not resolve hostname.*Correct the name"),
        (
            ("host1:1",),
            {"python": "/nowhere/python"},
            r"host1: .*(not found|No such file).*Name the Python of the hosts",
        ),
        (("host1:1",), {"ssh": "another key"}, r"Permission denied.*ssh_options"),
        (("host1:1", "host2:1"), {"interface": "eth7"}, r"no interface 'eth7' with an address; there are .*lo \(127"),
    ],
    ids=["unknown host", "no Python", "wrong key", "wrong interface"],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    start: Callable[..., dtkit.Cluster],
    network: Network,
    ssh_config: Path,
    tmp_path: Path,
    hosts: tuple[str, ...],
    options: dict[str, Any],
    message: str,
):
    if "ssh" in options:
        config = tmp_path / "config"
        config.write_text("\n".join(line for line in ssh_config.read_text().splitlines() if "IdentityFile" not in line))
        run_here("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
        options = {"ssh": ["-F", str(config), "-i", str(tmp_path / "other")]}
    with pytest.raises(dtkit.errors.ClusterError, match=message):
        start(len(hosts), hosts, **options)
    assert_nothing_left(network)


@pytest.mark.slow
def test_a_host_without_room_for_data_is_named(start: Callable[..., dtkit.Cluster], network: Network):
    with start(1, ("host1:1",)) as cluster:
        for folder in ("/dev/shm", "/tmp"):
            network["host1"].run("mount", "-o", "remount,size=1M", folder)
        try:
            with pytest.raises(dtkit.errors.ClusterError, match=r"host1: OSError: .*no room for 24 MB of data"):
                cluster.partition(np.zeros(2_000_000))
        finally:
            for folder in ("/dev/shm", "/tmp"):
                network["host1"].run("mount", "-o", "remount,size=50%", folder)
        assert cluster.run(lambda: 1) == [1]

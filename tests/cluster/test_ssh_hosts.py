"""Engines on several hosts by SSH: real servers, in namespaces with their own network, hostname and shared memory."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from dtkit._util import timeouts
from tests.support.hosts import scenarios
from tests.support.hosts.host import run as run_here
from tests.support.hosts.processes import list_commands
from tests.support.hosts.training import assert_exact, assert_nothing_left, make_wide_model, train, train_slowly
from tests.support.recovery import list_loss_events, list_texts, wait_for_step
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dtkit.cluster.launchers.agent_link import AgentLink
    from dtkit.messages import StoreAddress
    from tests.support.hosts.host import Host
    from tests.support.hosts.network import Network

pytestmark = pytest.mark.cluster
NOTICED_S = 30.0
"""Limit for a loss to be noticed and repaired on a machine with load."""


@pytest.fixture
def start(ssh_config: Path, runtime: Path) -> Callable[..., dtkit.Cluster]:
    """Start a cluster on hosts of the network, among no others of this user."""
    del runtime

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
def test_hosts_that_are_cut_off_or_lose_their_power_are_left_out(start: Callable[..., dtkit.Cluster], network: Network):
    cut, dark = network["host2"], network["host3"]
    with start(3, ("host1:1", "host2:1", "host3:1")) as cluster:
        pids = [node.pid for node in cluster.nodes]
        run = train(cluster, 1_000_000, make_wide_model())
        wait_for_step(run, 20)
        cut.throttle(16)
        text = wait_until(lambda: scenarios.find_event(run, "host2: its link is slow: "), NOTICED_S)
        assert re.search(r"slow: [\d.]+ [kM]B/s, [\d.]+ [MG]B/s elsewhere; in use \d+ %", text)
        cut.restore()
        run.stop(timeout=60)
        run = train_slowly(cluster, 1_000_000, on_failure="shrink")
        wait_for_step(run, 50)
        cut.cut()
        step = run.status.step
        cut.restore()
        wait_for_step(run, step + 50)
        assert [node.pid for node in cluster.nodes] == pids  # a cut within the grace does no harm
        cut.cut()
        wait_until(lambda: list_loss_events(run) == ["lost", "repair"], NOTICED_S)
        assert [node.host for node in cluster.nodes] == ["host1", "host3"]
        cut.restore()
        wait_until(lambda: not list_commands(network, [cut]), NOTICED_S)  # its engine has ended by itself
        dark.power_off()
        wait_until(lambda: list_loss_events(run) == ["lost", "repair", "lost", "repair"], NOTICED_S)
        assert [node.host for node in cluster.nodes] == ["host1"]
        run.stop()
        assert re.search(r"node 1 on host3 lost at step \d+: ", list_texts(run, "lost")[-1])
        assert_exact(run)
    assert_nothing_left(network)


@pytest.mark.slow
def test_repair_goes_on_after_a_host_is_lost_in_the_middle_of_it(start: Callable[..., dtkit.Cluster], network: Network):
    def end_agent(agent: AgentLink) -> None:
        network[agent.info.host].run("kill", "-9", str(agent.info.pid))

    with start(3, ("host1:1", "host2:2")) as cluster:
        transport = cluster._engine_group.transport
        launcher, access = transport._launcher, transport.hosts
        start_wave, open_store = launcher._start_wave, access.open_store

        def lose_starting_host(wave: Sequence[AgentLink]) -> None:
            del launcher._start_wave
            end_agent(wave[0])
            start_wave(wave)

        def lose_first_host(generation: int) -> StoreAddress:
            del access.open_store
            end_agent(launcher.agents[0])
            return open_store(generation)

        run = train_slowly(cluster, 2 * scenarios.LONG)
        wait_for_step(run, 50)
        launcher._start_wave = lose_starting_host
        network["host2"].run("kill", "-9", str(cluster.nodes[1].pid))
        wait_until(lambda: "repair" in list_loss_events(run), 2 * NOTICED_S)
        assert [event.rank for event in run.history.events if event.kind == "lost"] == [1, 2]
        wait_for_step(run, run.status.step + 50)
        access.open_store = lose_first_host
        network["host2"].run("kill", "-9", str(cluster.nodes[1].pid))
        run.wait(120)
        assert [event.rank for event in run.history.events if event.kind == "lost"] == [1, 2, 1, 0]
        assert list_loss_events(run)[-1] == "repair"
        assert [node.host for node in cluster.nodes] == ["host1", "host2", "host2"]
        assert_exact(run)
    assert_nothing_left(network)


@pytest.mark.slow
def test_hosts_without_ipv4_train_and_replace_an_engine(start: Callable[..., dtkit.Cluster], network: Network):
    hosts = [network["host1"], network["host2"]]
    for host in hosts:
        host.use_only_ipv6()
    try:
        with start(2, ("host1-by-ipv6:1", "host2-by-ipv6:1")) as cluster:
            agents = cluster._engine_group.transport._launcher.agents
            assert [agent.info.address for agent in agents] == [host.address6 for host in hosts]
            run = train_slowly(cluster, scenarios.LONG)
            wait_for_step(run, 50)
            network["host2"].run("kill", "-9", str(cluster.nodes[1].pid))
            run.wait(120)
            assert list_loss_events(run) == ["lost", "repair"]
            assert_exact(run)
    finally:
        for host in hosts:
            host.use_ipv4_too()
    assert_nothing_left(network)


@pytest.mark.slow
def test_hosts_behind_a_login_node_need_only_a_jump_host(
    start: Callable[..., dtkit.Cluster], network: Network, ssh_config: Path, tmp_path: Path
):
    hosts = [network["host2"], network["host3"]]
    config = tmp_path / "config"
    jumps = "".join(f"Host {host.name}\n  ProxyJump host1\n" for host in hosts)
    config.write_text(jumps + ssh_config.read_text())
    try:
        for host in hosts:  # this machine is the laptop: no packet of it reaches them
            run_here("ip", "route", "add", "unreachable", f"{host.address}/32")
        with start(2, ("host2:1", "host3:1"), ssh=["-F", str(config)]) as cluster:
            run = train(cluster)
            run.wait(60)
            assert_exact(run)
        with pytest.raises(dtkit.errors.ClusterError, match=r"host2: .*No route to host.*give a jump host"):
            start(2, ("host2:1", "host3:1"))
    finally:
        for host in hosts:
            run_here("ip", "route", "delete", "unreachable", f"{host.address}/32")
    assert_nothing_left(network)


CONTAINER = """\
exec unshare --mount --pid --ipc --fork --mount-proc --kill-child sh -c '
    mount -t tmpfs container /tmp && mount -t tmpfs container /dev/shm && exec "$@"' sh "$@"
"""
"""Runs a command with process numbers, temporary files and shared memory of its own, as containers do."""


def get_kind() -> str | None:
    import os

    return os.environ.get("KIND")


@pytest.mark.slow
def test_python_may_be_a_command_that_enters_a_container(
    start: Callable[..., dtkit.Cluster], network: Network, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(timeouts, "HEARTBEAT_TIMEOUT_S", 600.0)  # the end of the connection must tell
    script = network.folder / "container.sh"
    script.write_text(CONTAINER)
    with start(2, ("host1:1", "host2:1"), python=f"env KIND=container sh {script} {sys.executable}") as cluster:
        assert cluster.run(get_kind) == ["container"] * 2
        run = train_slowly(cluster, scenarios.LONG)
        wait_for_step(run, 50)
        run.inject_fault("kill", 1)
        scenarios.check_recovered(run, cluster, ["host1", "host2"])
        assert sum(cluster.partition(np.zeros((1000, 1000))).sizes) == 1000
        run = train_slowly(cluster, scenarios.LONG)
        wait_for_step(run, 50)
        (agent,) = [a for a in cluster._engine_group.transport._launcher.agents if a.info.host == "host2"]
        end_container(network["host2"])
        wait_until(lambda: not agent.is_alive)
        scenarios.check_recovered(run, cluster, ["host1", "host2"])
    assert_nothing_left(network)


def end_container(host: Host) -> None:
    """Kill the container's first process, and with it all others: no nanny is left that could report an end."""
    (container,) = [process for process in host.list_processes() if process.name() == "unshare"]
    (first,) = container.children()
    first.kill()


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

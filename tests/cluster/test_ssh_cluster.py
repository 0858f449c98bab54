"""What one cluster on hosts does: every test leaves it whole, so that it starts once."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import dtkit
from dtkit._util import timeouts
from dtkit._util.formatting import format_bytes
from dtkit.cluster.forkserver.engine import ENGINE_NAME
from dtkit.cluster.nanny import NANNY_NAME
from dtkit.training import recovered_data
from tests.support import oracle
from tests.support.hosts import scenarios
from tests.support.hosts.training import (
    assert_exact,
    assert_nothing_left,
    descend,
    make_wide_model,
    train,
    train_slowly,
)
from tests.support.recovery import list_loss_events, list_texts, wait_for_step
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

    from tests.support.hosts.network import Network

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def started(session_network: Network, session_ssh_config: Path) -> Iterator[dtkit.Cluster]:
    """Cluster with one engine on each of two hosts."""
    options = ["-F", str(session_ssh_config)]
    launcher = dtkit.SSH(["host1:1", "host2:1"], python=sys.executable, ssh_options=options)
    with dtkit.Cluster(2, launcher=launcher, device="cpu", threads=1) as cluster:
        yield cluster
    assert_nothing_left(session_network)


@pytest.fixture
def cluster(started: dtkit.Cluster, network: Network) -> dtkit.Cluster:
    """The cluster. The network is repaired after the test."""
    return started


def test_clocks_of_hosts_are_compared_so_that_the_timeline_is_one(cluster: dtkit.Cluster):
    assert_one_timeline(cluster)
    assert "clock" not in repr(cluster)


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


def test_a_link_that_becomes_slow_is_told_and_does_no_harm(cluster: dtkit.Cluster, network: Network):
    run = train(cluster, 100_000, make_wide_model())
    detector = run._driver.calls._link_detector
    try:
        wait_until(lambda: detector._best)  # its speed before
        network["host2"].throttle(16)
        text = wait_until(lambda: scenarios.find_event(run, "the link between host1 and host2 is slow: "), 30)
        assert re.search(r"slow: [\d.]+ [kM]B/s, [\d.]+ [MG]B/s before; in use \d+ % of the time. Name another", text)
    finally:
        run.stop(timeout=60)
    assert list_loss_events(run) == []
    assert_exact(run, make_wide_model())


def test_plan_predicts_the_bytes_that_cross_between_hosts(cluster: dtkit.Cluster, network: Network):
    model, data, steps = make_wide_model(), oracle.data(), 50
    plan = cluster.plan(
        model, data, batch_size=oracle.BATCH, optimizer=descend, loss=oracle.mean_loss, strategies=PLANNED
    )
    predicted = sum(row.sent_bytes for row in plan.rows)
    assert f"a step sends: DataParallel() {format_bytes(round(predicted))}" in " ".join(plan.notes)
    run = train(cluster, 2, model)
    run.wait(60)
    before = network["host2"].count_bytes()
    run.extend(steps=steps)
    run.resume()
    run.wait(60)
    measured = (network["host2"].count_bytes() - before) / steps
    assert 1 <= measured / predicted <= 1.2, (measured, predicted)  # headers, and the notebook's calls


def ignores_sigterm(process: psutil.Process) -> bool:
    mask = re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    assert mask is not None
    return bool(int(mask[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_engines_are_forked_on_their_host_and_their_ends_reported(cluster: dtkit.Cluster, network: Network):
    """A scheduler ends jobs by SIGTERM. Nannies outlive it, so that the notebook notices at once."""
    for host in network.hosts[:2]:
        processes = host.list_processes()
        (engine,) = [process for process in processes if process.name() == ENGINE_NAME]
        assert "dtkit.cluster.forkserver" in engine.cmdline()
        nannies = [process for process in processes if process.name() == NANNY_NAME]
        assert len(nannies) == 2  # the engine's, and the agent's
        assert all(map(ignores_sigterm, nannies))


def test_a_run_goes_on_after_a_host_lost_its_fork_server(cluster: dtkit.Cluster, network: Network):
    run = train_slowly(cluster, scenarios.LONG)
    wait_for_step(run, 50)
    (engine,) = [process for process in network["host2"].list_processes() if process.name() == ENGINE_NAME]
    server = engine.parent()
    assert server is not None
    server.kill()
    scenarios.check_recovered(run, cluster, ["host1", "host2"])
    assert not engine.is_running()


def test_an_interrupt_pauses_and_a_killed_agent_is_replaced(cluster: dtkit.Cluster, network: Network):
    scenarios.check_interrupt(cluster)
    scenarios.check_lost_agent(cluster, network)


def test_a_run_goes_on_after_all_hosts_lost_their_agents(
    cluster: dtkit.Cluster, network: Network, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(timeouts, "DEFAULT_SNAPSHOT_INTERVAL_S", 0.05)
    run = train_slowly(cluster, scenarios.LONG)
    folder = run._driver.snapshot_folder
    wait_until(lambda: recovered_data.is_stored(folder) and any(folder.glob("step-*")))
    for agent, node in zip(cluster._engine_group.transport._launcher.agents, cluster.nodes, strict=True):
        network[agent.info.host].run("kill", "-9", str(agent.info.pid), str(node.pid))
    run.wait(120)
    assert list_loss_events(run) == ["lost", "lost", "repair"]
    assert "from disk" in list_texts(run, "repair")[0]
    assert [node.host for node in cluster.nodes] == ["host1", "host2"]
    assert_exact(run)


PLANNED = [dtkit.DataParallel()]


def hang_on_rank_1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    rank = torch.distributed.get_rank()
    while rank == 1:
        pass
    return oracle.mean_loss(output, target)


def hold_the_interpreter(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Let rank 1 compute in C code, in which no other thread of its process can run, for some seconds."""
    import collections
    import itertools

    if torch.distributed.get_rank() == 1:
        collections.deque(itertools.repeat(None, 6_000_000_000), maxlen=0)
    return oracle.mean_loss(output, target)


@pytest.mark.parametrize(("loss", "how"), [(hang_on_rank_1, "forward"), (hold_the_interpreter, "stack is current")])
def test_stacks_of_a_stuck_engine_on_another_host_name_its_line(cluster: dtkit.Cluster, loss: Any, how: str):
    run = train(cluster, 100, loss=loss)
    try:
        report = wait_until(lambda: run.stall_report)
        assert (report.rank, report.host) == (1, "host2")
        assert loss.__name__ in str(report)
        text = repr(cluster.stacks())
        assert re.search(rf"rank 1, host2, .*{how}", text)
        assert loss.__name__ in text.partition("rank 1")[2]
    finally:
        cluster.interrupt()
        run.stop(timeout=60)


def name_host(item: int) -> tuple[int, str]:
    import socket

    return item, socket.gethostname()


def parabola(trial: Any) -> float:
    return (trial.params["x"] - 2) ** 2


def kill_once(item: int, name: str) -> int:
    """Kill the engine of item 2 the first time; all hosts see the file."""
    import os
    import pathlib
    import signal

    if item == 2 and not pathlib.Path(name).exists():
        pathlib.Path(name).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_map_and_search_use_all_hosts_and_replace_a_killed_engine(cluster: dtkit.Cluster, network: Network):
    assert {name for _, name in cluster.map(name_host, range(8))} == {"host1", "host2"}
    assert cluster.search(parabola, {"x": [0, 1, 2, 3]}).best_params == {"x": 2}
    assert cluster.map(kill_once, range(6), args=[str(network.folder / "killed")]) == list(range(6))
    assert [node.host for node in cluster.nodes] == ["host1", "host2"]


def test_boosted_trees_are_refused_on_several_hosts(cluster: dtkit.Cluster):
    pytest.importorskip("xgboost")
    data = np.zeros((10, 2)), np.zeros(10)
    with pytest.raises(NotImplementedError, match="needs engines on one host: XGBoost's connections are not encrypted"):
        cluster.train_xgboost({"objective": "reg:squarederror"}, data)


def test_a_host_without_room_for_data_is_named(cluster: dtkit.Cluster, network: Network):
    scenarios.check_full_memory(cluster, network)


def test_a_slow_link_does_no_harm_and_is_told(network: Network, ssh_config: Path):
    try:
        network["host2"].slow_down(30)
    except RuntimeError as error:
        pytest.skip(f"this kernel can't delay a link: {error}")
    launcher = dtkit.SSH(["host1:1", "host2:1"], python=sys.executable, ssh_options=["-F", str(ssh_config)])
    with dtkit.Cluster(2, launcher=launcher, device="cpu", threads=1) as cluster:
        assert_one_timeline(cluster)
        assert re.search(r"Timelines of host2 are exact to \d+ ms only", repr(cluster))

"""Engines on two hosts without shared memory and loopback: the same training and the same recovery."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dtkit
from tests.support import oracle
from tests.support.marks import slow
from tests.support.oracle import max_difference
from tests.support.second_host import NAME, Hosts, engines_on_two_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

STEPS = 12
OPTIONS: dict[str, Any] = {"batch_size": oracle.BATCH, "seed": oracle.SEED, "shuffle": "global"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with engines_on_two_hosts() as both_hosts:
        yield both_hosts


@pytest.fixture
def two_host_cluster(hosts: Hosts) -> Iterator[dtkit.Cluster]:
    options = {"interface": hosts.interface, "folder": hosts.folder, "device": "cpu", "threads": 1, "step_timeout": 20}
    with dtkit.Cluster.from_client(hosts.client, **options) as cluster:
        yield cluster


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    arguments = OPTIONS | {"loss": oracle.mean_loss, "optimizer": sgd, "steps": STEPS} | options
    return cluster.train(oracle.mlp(), oracle.data(), **arguments)


@pytest.mark.parametrize(
    "strategy",
    [dtkit.DataParallel(), slow(dtkit.Pipeline(2, 3)), slow(dtkit.TensorParallel(2)), slow(dtkit.Sharded())],
    ids=lambda strategy: type(strategy).__name__,
)
def test_training_on_two_hosts_equals_training_on_one(
    two_host_cluster: dtkit.Cluster, cluster2: dtkit.Cluster, strategy: dtkit.Strategy
):
    run, local_run = train(two_host_cluster, strategy=strategy), train(cluster2, strategy=strategy)
    run.wait(60)
    local_run.wait(60)
    assert max_difference(run.model.state_dict(), local_run.model.state_dict()) <= 1e-12
    assert run.verify(5).verdict == "PASS"
    assert run.evaluate(oracle.data()).values == pytest.approx(local_run.evaluate(oracle.data()).values, abs=1e-12)
    assert set(run.timeline.spans["rank"].tolist()) == {0, 1}
    assert [node.host for node in two_host_cluster.nodes][1] == NAME


def test_checkpoint_needs_a_folder_that_both_hosts_see(two_host_cluster: dtkit.Cluster, hosts: Hosts, tmp_path: Path):
    saved = hosts.folder / "checkpoints"
    train(two_host_cluster, strategy=dtkit.Sharded(), checkpoint_every=6, checkpoint_dir=saved).wait(60)
    assert [checkpoint.step for checkpoint in dtkit.list_checkpoints(saved)] == [6, 12]
    run = train(two_host_cluster, steps=2 * STEPS, resume_from=saved)
    run.wait(60)
    assert run.status.step == 2 * STEPS
    with pytest.raises(dtkit.errors.CheckpointError, match=r"does not see .* as the notebook does"):
        run.save(tmp_path)


def test_cluster_folder_that_one_host_cannot_see_is_refused(hosts: Hosts):
    with pytest.raises(
        dtkit.errors.EngineError, match=rf"rank 1 .*{NAME} can't write to .*from_client\(client, folder="
    ):
        dtkit.Cluster.from_client(hosts.client, device="cpu", interface=hosts.interface)
    with pytest.raises(ValueError, match=r"folder='/nowhere/at/all': No such file.* all engines can write to"):
        dtkit.Cluster.from_client(hosts.client, folder="/nowhere/at/all")


def test_error_names_the_host(two_host_cluster: dtkit.Cluster):
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise ValueError("not here")
        return oracle.mean_loss(output, target)

    run = train(two_host_cluster, loss=loss)
    with pytest.raises(dtkit.errors.EngineError, match=rf"rank 1 on {NAME}, step 0: ValueError: not here"):
        run.wait(60)
    train(two_host_cluster).wait(60)


@pytest.mark.slow
def test_two_interrupts_abort_a_stuck_step_on_the_other_host(two_host_cluster: dtkit.Cluster):
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        while torch.distributed.get_rank() == 1:
            pass
        return oracle.mean_loss(output, target)

    run, reported = train(two_host_cluster, loss=loss), threading.Event()
    unsubscribe = run.subscribe(lambda: run.stall_report and reported.set())
    assert reported.wait(20)
    unsubscribe()
    assert run.stall_report is not None
    assert (run.stall_report.rank, run.stall_report.host, run.stall_report.phase) == (1, NAME, "forward")
    assert NAME in repr(two_host_cluster.stacks())
    timers = [threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)) for seconds in (0.2, 0.7)]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    run.stop()
    train(two_host_cluster).wait(60)


def test_run_shrinks_when_a_host_is_lost(two_host_cluster: dtkit.Cluster):
    """This test is the last one, since no engine can be started on the other host again."""
    run = train(two_host_cluster, steps=100_000, on_failure="shrink")
    started = threading.Event()
    unsubscribe = run.subscribe(lambda: run.status.step > 20 and started.set())
    assert started.wait(30)
    unsubscribe()
    os.kill(two_host_cluster.nodes[1].pid, signal.SIGKILL)
    continued = threading.Event()
    text = "node 1 left out"
    unsubscribe = run.subscribe(
        lambda: (
            any(text in event.text and run.status.step > event.step + 20 for event in run.history.events)
            and continued.set()
        )
    )
    assert continued.wait(30), run.status
    unsubscribe()
    run.stop()
    assert run.timeline.spans.size
    assert two_host_cluster.world_size == 1
    assert run.history.rows()["rank"][-1] == 0

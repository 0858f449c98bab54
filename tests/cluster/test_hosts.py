"""Engines on two hosts that share neither memory nor loopback: the same training, the same ways out of trouble."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dtkit
from tests.support import oracle
from tests.support.oracle import difference
from tests.support.second_host import NAME, Hosts, engines_on_two_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

STEPS = 12
HOW: dict[str, Any] = {"batch_size": oracle.BATCH, "seed": oracle.SEED, "shuffle": "global"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with engines_on_two_hosts() as found:
        yield found


@pytest.fixture
def apart(hosts: Hosts) -> Iterator[dtkit.Cluster]:
    how = {"interface": hosts.interface, "folder": hosts.folder, "device": "cpu", "threads": 1, "step_timeout": 20}
    with dtkit.Cluster.from_client(hosts.client, **how) as cluster:
        yield cluster


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    how = HOW | {"loss": oracle.mean_loss, "optimizer": sgd, "steps": STEPS} | options
    return cluster.train(oracle.mlp(), oracle.data(), **how)


@pytest.mark.parametrize(
    "strategy",
    [dtkit.DataParallel(), dtkit.Pipeline(2, 3), dtkit.TensorParallel(2), dtkit.Sharded()],
    ids=lambda strategy: type(strategy).__name__,
)
def test_training_is_the_same_as_on_one_host(apart: dtkit.Cluster, cluster2: dtkit.Cluster, strategy: dtkit.Strategy):
    run, ours = train(apart, strategy=strategy), train(cluster2, strategy=strategy)
    run.wait(60)
    ours.wait(60)
    assert difference(run.model.state_dict(), ours.model.state_dict()) <= 1e-12
    assert run.verify(5).verdict == "PASS"
    assert run.evaluate(oracle.data()).values == pytest.approx(ours.evaluate(oracle.data()).values, abs=1e-12)
    assert set(run.timeline.spans["rank"].tolist()) == {0, 1}
    assert [node.host for node in apart.nodes][1] == NAME


def test_a_checkpoint_goes_to_a_folder_that_both_see(apart: dtkit.Cluster, hosts: Hosts, tmp_path: Path):
    saved = hosts.folder / "checkpoints"
    train(apart, strategy=dtkit.Sharded(), checkpoint_every=6, checkpoint_dir=saved).wait(60)
    assert [one.step for one in dtkit.list_checkpoints(saved)] == [6, 12]
    run = train(apart, steps=2 * STEPS, resume_from=saved)
    run.wait(60)
    assert run.status.step == 2 * STEPS
    with pytest.raises(dtkit.errors.CheckpointError, match=r"does not see .* as the notebook does"):
        run.save(tmp_path)


def test_a_folder_that_one_does_not_see_is_refused(hosts: Hosts):
    with pytest.raises(
        dtkit.errors.EngineError, match=rf"rank 1 .*{NAME} can't write to .*from_client\(client, folder="
    ):
        dtkit.Cluster.from_client(hosts.client, device="cpu", interface=hosts.interface)
    with pytest.raises(ValueError, match=r"folder='/nowhere/at/all': No such file.* all engines can write to"):
        dtkit.Cluster.from_client(hosts.client, folder="/nowhere/at/all")


def test_an_error_names_the_host(apart: dtkit.Cluster):
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise ValueError("not here")
        return oracle.mean_loss(output, target)

    run = train(apart, loss=loss)
    with pytest.raises(dtkit.errors.EngineError, match=rf"rank 1 on {NAME}, step 0: ValueError: not here"):
        run.wait(60)
    train(apart).wait(60)


@pytest.mark.slow
def test_two_interrupts_break_off_what_is_stuck_on_the_other_host(apart: dtkit.Cluster):
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        while torch.distributed.get_rank() == 1:
            pass
        return oracle.mean_loss(output, target)

    run, found = train(apart, loss=loss), threading.Event()
    unsubscribe = run.subscribe(lambda: run.stall_report and found.set())
    assert found.wait(20)
    unsubscribe()
    assert run.stall_report is not None
    assert (run.stall_report.rank, run.stall_report.host, run.stall_report.phase) == (1, NAME, "forward")
    assert NAME in repr(apart.stacks())
    presses = [threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)) for seconds in (0.2, 0.7)]
    for press in presses:
        press.start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    run.stop()
    train(apart).wait(60)


def test_a_host_that_is_lost_is_left_out(apart: dtkit.Cluster):
    """The last one: nobody here can start another engine there."""
    run = train(apart, steps=100_000, on_failure="shrink")
    begun = threading.Event()
    unsubscribe = run.subscribe(lambda: run.status.step > 20 and begun.set())
    assert begun.wait(30)
    unsubscribe()
    os.kill(apart.nodes[1].pid, signal.SIGKILL)
    went_on = threading.Event()
    found = "node 1 left out"
    unsubscribe = run.subscribe(
        lambda: (
            any(found in event.text and run.status.step > event.step + 20 for event in run.history.events)
            and went_on.set()
        )
    )
    assert went_on.wait(30), run.status
    unsubscribe()
    run.stop()
    assert run.timeline.spans.size
    assert apart.world_size == 1
    assert run.history.rows()["rank"][-1] == 0

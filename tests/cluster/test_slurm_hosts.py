"""Engines on the nodes of a Slurm job: real daemons, on hosts in namespaces."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from tests.support.hosts import scenarios
from tests.support.hosts import slurm as slurms
from tests.support.hosts.training import assert_exact, descend, make_wide_model, train
from tests.support.recovery import wait_for_step
from tests.support.waiting import ends_soon, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.hosts.network import Network
    from tests.support.hosts.slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_training_is_exact_and_survives_losses_until_its_job_is_canceled(
    start_by_slurm: Callable[..., dtkit.Cluster], slurm: Slurm, network: Network
):
    with start_by_slurm(3) as cluster:
        assert [node.host for node in cluster.nodes] == ["host1", "host1", "host2"]
        scenarios.check_training(cluster, network)
        scenarios.check_full_memory(cluster, network)
        scenarios.check_lost_engine(cluster, network)
        scenarios.check_interrupt(cluster)
        check_node_without_power(cluster, slurm, network)
        run = train(cluster, 100_000, on_failure="pause")
        wait_for_step(run, 50)
        jobs = slurm.list_jobs()
        slurm.call("scancel", *jobs)
        with pytest.raises(dtkit.DtkitError, match=rf"Slurm job ({'|'.join(jobs)}) is CANCELLED"):
            run.wait(60)
        told = [event.text for event in run.history.events if event.kind == "lost"]
        assert told
        assert all(re.match(r"node \d on \S+ lost at step ", text) and "Slurm job" in text for text in told)


def check_node_without_power(cluster: dtkit.Cluster, slurm: Slurm, network: Network) -> None:
    """Turn a node off while no other one is free: the run waits for a further job, which gets all data and models."""
    (first,) = slurm.list_jobs()
    others = slurm.call("sbatch", "--parsable", "--nodelist=host3", "--exclusive", *slurms.SLEEP).strip()
    large = cluster.partition((np.ones((1_000_000, 2)), np.zeros((1_000_000, 1))))  # 24 MB, which the new host needs
    run = train(cluster, 300, model=make_wide_model())
    run.inject_delay(0, 10)
    wait_for_step(run, 20)
    network["host2"].power_off()
    wait_until(lambda: scenarios.find_event(run, "the repair waits: Slurm job "))
    (further,) = set(slurm.list_jobs()) - {first, others}
    assert f"Slurm job {further} is PENDING (" in scenarios.find_event(run, "the repair waits: ")
    slurm.call("scancel", others)
    run.wait(150)
    assert [node.host for node in cluster.nodes] == ["host1", "host1", "host3"]
    assert_exact(run, make_wide_model())
    model = nn.Linear(2, 1, bias=False).double()
    run = cluster.train(model, large, loss=nn.MSELoss(), optimizer=descend, batch_size=999_999, steps=1)
    run.wait(60)
    before = model.weight.detach()
    assert torch.allclose(run.model.weight, before - 0.01 * 2 * before.sum(), rtol=0, atol=1e-12)
    assert set(cluster.map(get_sum, range(3), args=[np.ones(3_000_000)])) == {3e6}


def get_sum(item: int, array: Any) -> float:
    del item
    return float(array.sum())


def test_closing_cancels_the_job_for_which_a_repair_waits(
    start_by_slurm: Callable[..., dtkit.Cluster], slurm: Slurm, network: Network
):
    with start_by_slurm(2, dtkit.Slurm(nodes=2, address=network.address6)) as cluster:  # the nodes have both
        (first,) = slurm.list_jobs()
        other = slurm.call("sbatch", "--parsable", "--nodelist=host3", "--exclusive", *slurms.SLEEP).strip()
        run = train(cluster, 100_000)
        wait_for_step(run, 20)
        (agent,) = [a for a in cluster._engine_group.transport._launcher.agents if a.info.host == "host2"]
        network["host2"].run("kill", "-9", str(agent.info.pid))
        wait_until(lambda: scenarios.find_event(run, "the repair waits: Slurm job "))
        assert len(slurm.list_jobs()) == 3
        assert first in slurm.list_jobs()
    wait_until(lambda: slurm.list_jobs() == [other], 30)
    slurm.call("scancel", other)


def test_interrupt_while_the_job_waits_cancels_it(start_by_slurm: Callable[..., dtkit.Cluster], slurm: Slurm):
    slurm.call("sbatch", "--nodes=3", "--exclusive", *slurms.SLEEP)
    wait_until(lambda: len(slurm.list_jobs()) == 1)
    done = threading.Event()

    def interrupt() -> None:
        wait_until(lambda: len(slurm.list_jobs()) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        done.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        start_by_slurm(timeout=2)  # waiting in the queue doesn't count
    thread.join(60)
    assert len(slurm.list_jobs()) == 1
    slurm.call("scancel", *slurm.list_jobs())


def get_kind() -> str | None:
    import os

    return os.environ.get("KIND")


def test_notebook_inside_an_allocation_uses_its_nodes(
    start_by_slurm: Callable[..., dtkit.Cluster], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
):
    job = slurm.call("sbatch", "--parsable", "--nodes=2", *slurms.SLEEP).strip()
    wait_until(lambda: slurm.call("squeue", "--noheader", f"--jobs={job}", "--format=%T").strip() == "RUNNING")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with start_by_slurm(2, dtkit.Slurm(python=f"env KIND=command {sys.executable}")) as cluster:
        assert cluster.run(get_kind) == ["command"] * 2
        assert [node.host for node in cluster.nodes] == ["host1", "host2"]
        assert cluster.run(os.getpid)
        assert slurm.list_jobs() == [job]
    slurm.call("scancel", job)


def test_address_that_the_nodes_do_not_reach_is_told_soon(start_by_slurm: Callable[..., dtkit.Cluster]):
    with (
        ends_soon(),
        pytest.raises(dtkit.errors.ClusterError, match=r"host\d can't reach .* 127\.0\.0\.1, port \d+: .*address="),
    ):
        start_by_slurm(2, dtkit.Slurm(nodes=2, address="127.0.0.1"))

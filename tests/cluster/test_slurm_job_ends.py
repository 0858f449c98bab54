"""Ends of the Slurm job that runs the engines: its time limit, preemption, ``scancel``, and further jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dtkit
from dtkit._util import timeouts
from dtkit.training import recovered_data
from tests.support.hosts import scenarios
from tests.support.hosts.training import assert_exact, train, train_slowly
from tests.support.recovery import list_loss_events, wait_for_step
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.hosts.slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cluster notice soon that a test has shortened its job."""
    monkeypatch.setattr(timeouts, "TIME_LIMIT_POLL_S", timeouts.MIN_TIME_LIMIT_POLL_S)


def test_time_limit_is_told_before_and_the_next_job_goes_on(
    start_by_slurm: Callable[..., dtkit.Cluster], slurm: Slurm, tmp_path: Path
):
    saved = tmp_path / "saved"
    with start_by_slurm(2, dtkit.Slurm(nodes=2, time=30, checkpoint_minutes=1)) as cluster:
        (job,) = slurm.list_jobs()
        run = train_slowly(cluster, 1_000_000, checkpoint_dir=saved)
        slurm.shorten(job)
        wait_until(lambda: scenarios.find_event(run, "resume_from="), 60)
        slurm.end_time_now(job)
        run.inject_delay(0, 100)  # less work until Slurm looks
        assert f"Slurm job {job} ends in " in scenarios.find_event(run, "writes a checkpoint before that")
        assert str(saved) in scenarios.find_event(run, "resume_from=")
        with pytest.raises(dtkit.DtkitError, match=rf"no host is left: Slurm job {job} is TIMEOUT.*resume_from="):
            run.wait(180)
        loss = scenarios.find_event(run, "node 0 on host1 lost at step ")
        assert f": its process has ended, or was silent for 8 s (Slurm job {job} is TIMEOUT" in loss
        assert slurm.list_jobs() == []
    (checkpoint,) = dtkit.list_checkpoints(saved)
    with start_by_slurm(2) as cluster:
        run = train(cluster, checkpoint.step + 50, resume_from=saved)
        run.wait(60)
        assert_exact(run)


def test_requeue_moves_the_run_to_a_further_job(start_by_slurm: Callable[..., dtkit.Cluster], slurm: Slurm):
    with start_by_slurm(2, dtkit.Slurm(nodes=2, time=30, checkpoint_minutes=1, requeue=True)) as cluster:
        (first,) = slurm.list_jobs()
        run = train_slowly(cluster, 1_000_000)
        wait_for_step(run, 20)
        slurm.shorten(first)
        wait_until(lambda: scenarios.find_event(run, "all go on from step"), 120)
        (second,) = slurm.list_jobs()
        assert second != first
        wait_for_step(run, run.status.step + 50)
        run.stop()
        assert scenarios.find_event(run, f"Slurm job {first} is given back now")
        assert list_loss_events(run)[-1] == "repair"
        assert_exact(run)


def test_requeue_follows_a_preempted_job_but_not_a_canceled_one(
    start_by_slurm: Callable[..., dtkit.Cluster], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(timeouts, "DEFAULT_SNAPSHOT_INTERVAL_S", 0.05)
    with start_by_slurm(2, dtkit.Slurm(nodes=2, requeue=True)) as cluster:
        (first,) = slurm.list_jobs()
        run = train_slowly(cluster, 1_000_000)
        folder = run._driver.snapshot_folder
        wait_until(lambda: recovered_data.is_stored(folder) and any(folder.glob("step-*")))
        urgent = slurm.preempt()
        waits = wait_until(lambda: scenarios.find_event(run, "the repair waits: 0 of 2 hosts are here; Slurm job "))
        assert f"Slurm job {first} is PREEMPTED" in scenarios.find_event(run, "node 0 on host")
        slurm.call("scancel", urgent)
        wait_until(lambda: list_loss_events(run)[-1] == "repair", 120)
        (second,) = slurm.list_jobs()
        assert f"Slurm job {second} is PENDING" in waits
        wait_for_step(run, run.status.step + 50)
        run.pause(timeout=60)
        assert_exact(run)
        run.resume()
        slurm.call("scancel", second)
        with pytest.raises(dtkit.DtkitError, match=rf"Slurm job {second} is CANCELLED.*resume_from="):
            run.wait(60)
        assert slurm.list_jobs() == []


def test_preempted_job_is_named_and_its_checkpoint_goes_on_in_another(
    start_by_slurm: Callable[..., dtkit.Cluster], slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(timeouts, "HEARTBEAT_TIMEOUT_S", 600.0)  # the agents must tell that they end
    saved = tmp_path / "saved"
    with start_by_slurm(2) as cluster:
        (job,) = slurm.list_jobs()
        run = train_slowly(cluster, 100_000, checkpoint_dir=saved, checkpoint_every=10)
        wait_for_step(run, 25)
        urgent = slurm.preempt()
        with pytest.raises(dtkit.DtkitError, match=rf"Slurm job {job} is PREEMPTED.*resume_from="):
            run.wait(60)
    slurm.call("scancel", urgent)
    last = max(checkpoint.step for checkpoint in dtkit.list_checkpoints(saved))
    with start_by_slurm(2) as cluster:
        run = train(cluster, last + 50, resume_from=saved)
        run.wait(60)
        assert_exact(run)

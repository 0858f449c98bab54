"""The watcher of a scheduler's jobs: when it prepares a run, and how often it asks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

import dtkit
from dtkit._util import timeouts
from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.devices import plan_devices
from dtkit.cluster.job_end_watcher import JobEndWatcher
from dtkit.cluster.launched_transport import LaunchedTransport
from dtkit.errors import ClusterError
from dtkit.rpc.job_end import JobEnd


@dataclasses.dataclass
class Jobs:
    """The part of a transport that the watcher uses."""

    ends: list[JobEnd]
    error: str = ""
    ended_early: list[str] = dataclasses.field(default_factory=list)

    def list_job_ends(self) -> list[JobEnd]:
        if self.error:
            raise ClusterError(self.error)
        return self.ends

    def end_job_early(self, job: str) -> None:
        self.ended_early.append(job)


class PreparedRun:
    """The part of a run that the watcher uses."""

    def __init__(self, *, can_follow: bool = True) -> None:
        self.lifecycle, self.can_follow = self, can_follow
        self.prepared: list[str] = []

    def prepare_for_end(self, end: JobEnd) -> bool:
        self.prepared.append(end.job)
        return self.can_follow


def check(jobs: Jobs, *runs: Any) -> tuple[JobEndWatcher, float]:
    """Check once for each run that is the current one in turn. Return the watcher and the last wait."""
    current: list[Any] = [None]
    watcher, wait_s = JobEndWatcher(None, lambda: current[0]), 0.0  # type: ignore[arg-type]
    for current[0] in runs:
        wait_s = watcher.check(jobs)  # type: ignore[arg-type]
    return watcher, wait_s


def test_each_run_is_prepared_once_for_each_job():
    run, later = PreparedRun(), PreparedRun()
    jobs = Jobs([JobEnd("Slurm job 1", 200.0, 300.0), JobEnd("Slurm job 2", 301.0, 300.0)])
    check(jobs, None, run, run, later)
    assert (run.prepared, later.prepared) == (["Slurm job 1"], ["Slurm job 1"])
    assert jobs.ended_early == []


@pytest.mark.parametrize("can_follow", [True, False])
def test_a_job_is_given_back_only_after_its_run_was_prepared(*, can_follow: bool):
    jobs = Jobs([JobEnd("Slurm job 1", 200.0, 300.0, is_followed=True)])
    check(jobs, PreparedRun(can_follow=can_follow))
    assert jobs.ended_early == ["Slurm job 1"] * can_follow


@pytest.mark.parametrize(
    ("left_s", "wait_s"), [(9000.0, timeouts.TIME_LIMIT_POLL_S), (310.0, 10.0), (300.5, timeouts.MIN_TIME_LIMIT_POLL_S)]
)
def test_the_watcher_asks_again_when_something_is_due(left_s: float, wait_s: float):
    assert check(Jobs([JobEnd("Slurm job 1", left_s, 300.0)]), PreparedRun())[1] == pytest.approx(wait_s)


def test_a_scheduler_that_does_not_answer_is_asked_later():
    run = PreparedRun()
    assert check(Jobs([], error="squeue did not answer"), run)[1] == timeouts.TIME_LIMIT_POLL_S
    assert run.prepared == []


@pytest.mark.parametrize("on_failure", ["shrink", "pause"])
def test_only_repair_can_move_a_run_to_a_further_job(on_failure: str):
    hosts: dict[str, Any] = dtkit.Slurm(requeue=True).to_json()
    transport = LaunchedTransport.__new__(LaunchedTransport)
    transport.config = LaunchConfig("Slurm", plan_devices(1, "cpu", 1), 60.0, hosts=hosts)
    watcher = JobEndWatcher(SimpleNamespace(transport=transport), lambda: None)  # type: ignore[arg-type]
    watcher.check_can_follow("repair")
    with pytest.raises(ValueError, match=rf"on_failure='{on_failure}' and Slurm\(requeue=True\) exclude each other"):
        watcher.check_can_follow(on_failure)
    hosts["requeue"] = False
    watcher.check_can_follow(on_failure)

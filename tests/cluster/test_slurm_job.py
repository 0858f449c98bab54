"""Jobs of a real Slurm: submitted, watched, cancelled, refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dtkit.cluster.launchers.script import read_log_end
from dtkit.cluster.launchers.slurm_job import QueueState, SlurmJob, submit_job
from dtkit.errors import ClusterError
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.hosts.network import Network
    from tests.support.hosts.slurm import Slurm

pytestmark = pytest.mark.cluster


def submit(task: str, *directives: str, **environment: str) -> SlurmJob:
    lines = "".join(f"#SBATCH {line}\n" for line in ("--output=/dev/null", *directives))
    return SlurmJob(submit_job(f"#!/bin/bash\n{lines}{task}\n", environment), Path("/dev/null"))


def wait_for(job: SlurmJob, state: str) -> QueueState:
    return wait_until(lambda: (now := job.query()).state == state and now)


def test_job_waits_for_nodes_runs_and_is_cancelled(slurm: Slurm):
    first = submit("sleep 600", "--nodes=3", "--exclusive", "--time=10")
    running = wait_for(first, "RUNNING")
    assert (running.nodes, running.is_running) == ("host[1-3]", True)
    assert running.time_left_s is not None
    assert 0 < running.time_left_s <= 600
    second = submit("sleep 600", "--nodes=3", "--exclusive")
    waiting = wait_until(lambda: (now := second.query()).reason in ("Resources", "Priority") and now)
    assert waiting.is_waiting
    assert waiting.time_left_s is None
    assert str(waiting) in ("PENDING (Resources)", "PENDING (Priority)")
    second.cancel()
    first.cancel()
    assert [job.query().state for job in (first, second)] == ["CANCELLED", "CANCELLED"]
    first.cancel()  # again
    wait_until(lambda: not slurm.list_jobs())


def test_environment_reaches_the_job_but_no_command_line(slurm: Slurm, network: Network):
    out = network.folder / "said"
    job = submit(f'echo "$SECRET" > {out}; sleep 600', SECRET="not for others")
    wait_until(lambda: out.exists() and out.read_text())
    assert out.read_text() == "not for others\n"
    shown = slurm.call("scontrol", "show", "job", job.job_id)
    commands = [process.cmdline() for host in network.hosts for process in host.list_processes()]
    assert "not for others" not in shown + str(commands)
    out.unlink()


def test_state_names_failure_and_unknown_job(slurm: Slurm):
    assert str(wait_for(submit("exit 3"), "FAILED")) == "FAILED (NonZeroExitCode)"
    assert SlurmJob("99999", Path("/dev/null")).query().state == "UNKNOWN"


@pytest.mark.parametrize(
    ("directive", "words"),
    [
        ("--partition=nope", "invalid partition specified: nope"),
        ("--gpus-per-node=9", "Requested node configuration is not available"),
        ("--mem=900G", "Memory specification can not be satisfied"),
    ],
)
def test_refused_job_lists_the_partitions(slurm: Slurm, directive: str, words: str):
    with pytest.raises(ClusterError, match=rf"Slurm refused the job: {words}.*3 nodes with 4 cores, 8000 MB, gpu:2"):
        submit("true", directive)
    assert slurm.list_jobs() == []


@pytest.mark.parametrize("directive", ["--nodes=9", "--time=5:00:00", "--cpus-per-task=99"])
def test_job_that_would_wait_forever_is_reported(slurm: Slurm, directive: str):
    job = submit("true", directive)
    state = wait_until(lambda: (now := job.get_state()).phase == "ended" and now)
    assert f"Slurm job {job.job_id} is PENDING (Partition" in state.text
    assert "and would stay there: " in state.text
    assert "up to 1:00:00" in state.text
    job.cancel()


def test_missing_commands_of_slurm_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"sbatch is not on this notebook's PATH. Start the notebook where"):
        submit("true")


def test_job_keeps_its_state_while_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    state = SlurmJob("7", tmp_path / "log").get_state()
    assert state.phase == "waiting"
    assert state.text.startswith("Slurm job 7: squeue is not on this notebook's PATH.")


def test_end_of_a_job_log_is_quoted_and_a_missing_one_explained(tmp_path: Path):
    log = tmp_path / "slurm-7.log"
    assert "choose another one with log_folder=" in read_log_end(log)
    log.write_text("line\n" * 1000 + "python: not found\n")
    assert read_log_end(log).endswith("line\npython: not found")
    assert len(read_log_end(log)) < 700

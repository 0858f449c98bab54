"""Slurm's options and the batch script that they make: nothing is sent that wasn't asked for."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dtkit
from dtkit._util import timeouts
from dtkit.cluster.launchers import slurm_job
from dtkit.cluster.launchers.slurm_job import QueueState, SlurmJob, make_job_end, parse_time
from dtkit.rpc.job_end import JobEnd

DEFAULT_DIRECTIVES = [
    "--job-name=dtkit",
    "--nodes=1",
    "--ntasks-per-node=1",
    f"--output={Path.home()}/.cache/dtkit/slurm-%j.log",
    "--no-requeue",
    "--no-kill",
]
AGENT = """ bash -c 'input=$DTKIT_AGENT_INPUT; unset DTKIT_AGENT_INPUT; exec {} -m dtkit.cluster.agent"""
FULL: dict[str, Any] = {
    "partition": "gpu",
    "nodes": 2,
    "gpus_per_node": 8,
    "cpus_per_task": 32,
    "memory": "200G",
    "time": "1-12:00:00",
    "account": "physics",
    "qos": "long",
    "setup": ["module load cuda", "source ~/env/bin/activate"],
    "directives": ["--constraint=a100"],
    "log_folder": "/shared/logs",
    "python": "apptainer exec image.sif python",
}


def list_directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def test_script_without_options_asks_only_for_one_task_on_each_node():
    script = dtkit.Slurm().script()
    assert list_directives(script) == DEFAULT_DIRECTIVES
    srun = script.splitlines()[-1]
    assert srun.startswith("srun --no-kill --kill-on-bad-exit=0" + AGENT.format(sys.executable))


def test_script_has_each_option_once_and_setup_before_python():
    script = dtkit.Slurm(**FULL).script()
    assert list_directives(script) == [
        *("--job-name=dtkit", "--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--account=physics"),
        *("--qos=long", "--gpus-per-node=8", "--cpus-per-task=32", "--mem=200G", "--time=1-12:00:00"),
        *("--output=/shared/logs/slurm-%j.log", "--no-requeue", "--no-kill", "--constraint=a100"),
    ]
    assert script.splitlines()[-3:-1] == ["module load cuda", "source ~/env/bin/activate"]
    srun = "srun --cpus-per-task=32 --no-kill --kill-on-bad-exit=0"
    assert script.splitlines()[-1].startswith(srun + AGENT.format("apptainer exec image.sif python"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, value in FULL.items() if name != "nodes"])
def test_each_option_changes_the_script_by_itself_alone(name: str, value: Any):
    before, after = dtkit.Slurm().script(), dtkit.Slurm(**{name: value}).script()
    changed = set(after.splitlines()) ^ set(before.splitlines())
    assert 1 <= len(changed) <= 3
    assert len(list_directives(after)) - len(list_directives(before)) in (0, 1)


def test_inside_a_job_its_nodes_are_used_unless_another_job_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    script = dtkit.Slurm(setup=["module load cuda"]).script()
    assert script.splitlines()[:2] == ["#!/bin/bash", "module load cuda"]
    assert script.splitlines()[2].startswith("srun --overlap --ntasks-per-node=1 --no-kill")
    assert dtkit.Slurm().count_agents(6) == 3
    assert dtkit.Slurm(nodes=2).count_agents(6) == 2
    assert "srun --overlap --nodes=2 " in dtkit.Slurm(nodes=2).script()
    assert "#SBATCH --partition=gpu" in dtkit.Slurm(partition="gpu").script()


def test_script_and_launcher_show_themselves_readably():
    launcher = dtkit.Slurm(partition="gpu", nodes=2, setup=["module load cuda"])
    assert repr(launcher) == "Slurm(partition='gpu', nodes=2, setup=('module load cuda',))"
    assert repr(launcher.script()) == str(launcher.script())
    assert dtkit.Slurm(**dataclasses.asdict(launcher)) == launcher


@pytest.mark.parametrize(("memory", "sent"), [("32G", "32G"), ("500", "500"), ("24 GB", "22889M"), ("1GiB", "1024M")])
def test_memory_is_sent_in_units_that_slurm_knows(memory: str, sent: str):
    assert f"--mem={sent}" in list_directives(dtkit.Slurm(memory=memory).script())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"walltime": "1:00:00"}, r"Slurm\(\) has no option walltime=; did you mean time=\?"),
        ({"queue": "gpu"}, "did you mean partition="),
        ({"partitions": "gpu"}, "did you mean partition="),
        ({"colour": "red"}, "it takes partition, nodes, "),
        ({"args": ("gpu",)}, r"name each option, as in Slurm\(partition='gpu'\)"),
    ],
)
def test_unknown_option_is_refused_with_the_word_that_was_meant(options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        dtkit.Slurm(*options.pop("args", ()), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes=0; it must be an integer from 1 up"),
        ({"nodes": True}, "nodes=True"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1; it must be an integer from 0 up"),
        ({"time": "two hours"}, "time='two hours'; it must be minutes, or text such as"),
        ({"time": 0}, "time=0"),
        ({"memory": "much"}, "'much' is not an amount of memory"),
        ({"setup": "module load cuda"}, r"must be a list of lines. Write setup=\['module load cuda'\]"),
        ({"partition": "gpu\n#SBATCH --nodes=99"}, "must be text of one line"),
        ({"directives": ["a100"]}, "must be an option of sbatch, as in '--constraint=a100'"),
    ],
)
def test_bad_value_is_refused_before_anything_is_sent(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dtkit.Slurm(**options)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:59", 59), ("4:30", 270), ("1:00:00", 3600), ("2-01:00:01", 176401), ("UNLIMITED", None), ("INVALID", None)],
)
def test_time_that_slurm_prints_becomes_seconds(text: str, seconds: float | None):
    assert parse_time(text) == seconds


def test_a_canceled_job_is_asked_for_its_state_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    queue = ["RUNNING|None|1:00|2:00|node1\n"]

    def answer(command: list[str]) -> subprocess.CompletedProcess[str]:
        if command[0] == "scancel":
            queue[:] = ["CANCELLED|None|0:00|2:00|node1\n"]
        return subprocess.CompletedProcess(command, 0, queue[0], "")

    monkeypatch.setattr(slurm_job, "call_slurm", answer)
    job = SlurmJob("7", tmp_path / "log")
    assert job.get_state().phase == "running"
    job.cancel()
    assert job.get_state().phase == "ended"


@pytest.mark.parametrize(
    ("minutes", "limit_s", "before_s"),
    [(None, 7200.0, 300.0), (None, 240.0, 60.0), (None, None, 300.0), (2, 60.0, 120)],
)
def test_checkpoint_is_due_minutes_before_the_limit_or_in_its_last_quarter(
    minutes: float | None, limit_s: float | None, before_s: float
):
    now = QueueState("RUNNING", time_left_s=250.0, time_limit_s=limit_s)
    assert make_job_end("7", now, minutes, requeue=True) == JobEnd("Slurm job 7", 250.0, before_s, is_followed=True)


def test_job_without_a_time_limit_has_no_end():
    assert make_job_end("7", QueueState("RUNNING"), 5, requeue=False) is None


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED", "CANCELLED", "RUNNING", "COMPLETING"])
def test_requeue_follows_limits_and_preemption_but_never_a_cancellation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, *, requeue: bool
):
    monkeypatch.setattr(timeouts, "SLURM_CANCEL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(slurm_job, "query_job", lambda _: QueueState(state))
    job = SlurmJob.from_json(SlurmJob("7", tmp_path / "log", requeue=requeue).to_json())
    goes_on = state == "RUNNING" or (requeue and state in ("TIMEOUT", "PREEMPTED"))
    assert job.explain_end() == (None if goes_on else f"Slurm job 7 is {state}")


def test_checkpoint_minutes_must_be_a_number_above_zero():
    with pytest.raises(ValueError, match=r"checkpoint_minutes=0; it must be a number of minutes above 0"):
        dtkit.Slurm(checkpoint_minutes=0)


def test_job_whose_agent_refuses_has_ended_though_others_of_it_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "log"
    monkeypatch.setattr(slurm_job, "query_job", lambda _: QueueState("RUNNING"))
    log.write_text("module loaded\n")
    assert SlurmJob("7", log).get_state().phase == "running"
    log.write_text("module loaded\nnode1: dtkit agent: node1 can't reach 10.0.0.1\nmore\n")
    state = SlurmJob("7", log).get_state()
    assert (state.phase, state.text) == ("ended", "Slurm job 7 is RUNNING. node1 can't reach 10.0.0.1")


def test_lost_engines_are_explained_by_the_reason_that_slurm_names_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """While Slurm ends a job's processes, its state is COMPLETING, whatever the reason."""
    completing = QueueState("COMPLETING")
    states = [QueueState("RUNNING"), completing, completing, QueueState("PREEMPTED")]
    monkeypatch.setattr(slurm_job, "query_job", lambda _: states.pop(0) if len(states) > 1 else states[0])
    job = SlurmJob("7", tmp_path / "log", requeue=True)
    assert job.get_state().phase == "running"
    assert job.describe_end() == "Slurm job 7 is PREEMPTED"
    states[:] = [completing, QueueState("PREEMPTED")]
    assert job.explain_end() is None  # a further job follows it
    states[:] = [completing, QueueState("CANCELLED")]
    assert job.explain_end() == "Slurm job 7 is CANCELLED"

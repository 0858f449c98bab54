"""Agents that launchers start on hosts: a program that records its input takes the place of Python."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

import dtkit
from dtkit.cluster.launchers.hosts import AgentJob, AgentRequest, HostLauncher
from dtkit.errors import ClusterError
from tests.support.hosts import network as networks
from tests.support.hosts import training
from tests.support.hosts.processes import list_commands
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.hosts.network import Network
    from tests.support.hosts.slurm import Slurm

pytestmark = pytest.mark.cluster

RECORDER = """\
read -r line
echo "$line" > {folder}/$(hostname).partial
env | grep -c "{secret}" >> {folder}/$(hostname).partial
mv {folder}/$(hostname).partial {folder}/$(hostname).agent
exec sleep 600
"""
SECRET = "a key that nobody else may read"


class Agents:
    """Agents of one launcher, as they record themselves."""

    def __init__(self, network: Network, tmp_path: Path) -> None:
        self.network, self.request = network, AgentRequest(tmp_path / "dtkit-1", {"key": SECRET}, 2, 2)
        self.request.folder.mkdir()
        program = network.folder / "agent.sh"
        program.write_text(RECORDER.format(folder=network.folder, secret=SECRET))
        self.python = f"sh {program}"
        self.jobs: list[AgentJob] = []

    def start(self, launcher: HostLauncher) -> None:
        """Start them, and wait until each has its input and nothing of it in its environment."""
        self.jobs = launcher.start_agents(self.request)
        wait_until(lambda: len(self.read()) == 2 or self.raise_ended(), 30)
        assert all(lines[0]["connection"] == {"key": SECRET} for lines in self.read().values())
        assert {lines[1] for lines in self.read().values()} == {0}

    def read(self) -> dict[str, list[dict]]:
        """Return what agents have recorded, by host."""
        paths = self.network.folder.glob("*.agent")
        return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in paths}

    def raise_ended(self) -> None:
        """Raise the text of a job that has ended."""
        for state in (job.get_state() for job in self.jobs):
            if state.phase == "ended":
                raise ClusterError(state.text)

    def list_commands(self) -> list[str]:
        """Return the command lines on the hosts that belong to agents."""
        return list_commands(self.network)

    def cancel(self) -> None:
        """End them, and wait until no host has any."""
        for job in self.jobs:
            job.cancel()
            job.cancel()  # idempotent
        wait_until(lambda: not self.list_commands(), 30)


@pytest.fixture
def agents(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(network.folder / "home"))
    agents = Agents(network, tmp_path)
    yield agents
    agents.cancel()
    for path in [*network.folder.glob("*.agent"), *network.folder.glob("*.partial")]:
        path.unlink()


def test_slurm_job_starts_one_agent_on_each_node(agents: Agents, slurm: Slurm):
    launcher = dtkit.Slurm(nodes=2, python=agents.python)
    agents.start(launcher)
    assert set(agents.read()) == {"host1", "host2"}
    assert SECRET not in str(agents.list_commands()) + slurm.call("scontrol", "show", "job", *slurm.list_jobs())
    (job,) = agents.jobs
    wait_until(lambda: job.get_state().phase == "running", 30)
    assert launcher.restore_job(json.loads(json.dumps(job.to_json()))).get_state().phase == "running"
    assert launcher.get_controller_address() == agents.network.address
    agents.cancel()
    assert job.get_state().phase == "ended"
    assert list((agents.network.folder / "home").rglob("*.log")) == []


def test_further_job_avoids_the_nodes_of_the_cluster(agents: Agents, slurm: Slurm):
    agents.start(dtkit.Slurm(nodes=2, python=agents.python))
    (job,) = agents.jobs
    wait_until(lambda: job.get_state().phase == "running", 30)
    further = dataclasses.replace(agents.request, num_agents=1)
    agents.jobs += dtkit.Slurm(nodes=2, python=agents.python).start_agents(further)
    wait_until(lambda: len(agents.read()) == 3, 30)
    assert len(slurm.list_jobs()) == 2


def test_agents_inside_an_allocation_are_a_step_of_it(
    agents: Agents, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    job = slurm.call("sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--wrap", "exec sleep 600").strip()
    wait_until(lambda: slurm.call("squeue", "--noheader", f"--jobs={job}", "--format=%T").strip() == "RUNNING")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    launcher = dtkit.Slurm(python=agents.python)
    agents.start(launcher)
    assert set(agents.read()) == {"host1", "host2"}
    assert slurm.list_jobs() == [job]
    restored = launcher.restore_job(json.loads(json.dumps(agents.jobs[0].to_json())))
    assert restored.list_pids() == agents.jobs[0].list_pids() != []
    restored.cancel()
    wait_until(lambda: agents.jobs[0].get_state().phase == "ended", 30)
    slurm.call("scancel", job)


def make_mpi(agents: Agents, config: Path, **options: str) -> dtkit.MPI:
    options = {"python": agents.python} | options
    return training.make_mpi(agents.network, config, ("host1:1", "host2:1"), **options)


def test_mpirun_starts_an_agent_on_each_host_with_its_name(agents: Agents, ssh_config: Path):
    networks.require("mpirun")
    agents.start(make_mpi(agents, ssh_config))
    assert {host: lines[0]["host"] for host, lines in agents.read().items()} == {"host1": "host1", "host2": "host2"}
    assert SECRET not in str(agents.list_commands())
    (first,) = [p for p in agents.network["host1"].list_processes() if p.name() == "sleep"]
    first.kill()
    first.wait(30)
    (job,) = agents.jobs
    assert job.get_state().phase == "running"
    assert [p.name() for p in agents.network["host2"].list_processes() if p.name() == "sleep"] == ["sleep"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "/no/python"}, "(?s)Slurm job .*/no/python: No such file or directory"),
        ({"setup": ["exit 3"]}, r"FAILED \(NonZeroExitCode\). It printed nothing"),
        ({"log_folder": "/proc/none"}, r"can't be created: No such file.*log_folder="),
        ({"partition": "nope"}, "invalid partition specified: nope.*Partitions here: train"),
        ({"gpus_per_node": 9}, "Requested node configuration is not available.*gpu:2"),
        ({"time": "5:00:00"}, "PENDING .*would stay there.*up to 1:00:00"),
    ],
    ids=["python", "setup", "logs", "partition", "gpus", "time"],
)
def test_request_that_slurm_cannot_serve_is_reported(agents: Agents, slurm: Slurm, options: dict, message: str):
    with pytest.raises((ClusterError, ValueError), match=message):
        agents.start(dtkit.Slurm(**{"nodes": 2, "python": agents.python} | options))
    agents.cancel()
    wait_until(lambda: not slurm.list_jobs(), 30)


def test_log_folder_that_nodes_do_not_see_is_reported(agents: Agents, slurm: Slurm, tmp_path: Path):
    with pytest.raises(ClusterError, match=rf"FAILED.*No output in {tmp_path}.*choose another one with log_folder="):
        agents.start(dtkit.Slurm(nodes=2, python=agents.python, log_folder=str(tmp_path)))
    assert slurm.call("sinfo")


def test_mpirun_that_reaches_no_host_or_no_python_raises(agents: Agents, ssh_config: Path):
    networks.require("mpirun")
    with pytest.raises(ClusterError, match=r"mpirun has ended.*/no/python: No such file"):
        agents.start(make_mpi(agents, ssh_config, python="/no/python"))

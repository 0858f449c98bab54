"""Agents on the nodes of a Slurm job: the user's options, and the batch script made from them."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments, suggest_options
from dtkit.cluster.launchers.script import INPUT_VARIABLE, Script, ScriptLauncher, check_count, format_agent
from dtkit.cluster.launchers.slurm_job import SlurmJob, SlurmStep, call_slurm, list_node_names, submit_job
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.cluster.launchers.hosts import AgentJob, AgentRequest

_OTHER_WORDS = {  # of dask-jobqueue, submitit and sbatch
    "cores": "cpus_per_task",
    "cpus": "cpus_per_task",
    "gpus": "gpus_per_node",
    "job_extra_directives": "directives",
    "name": "job_name",
    "job_script_prologue": "setup",
    "log_directory": "log_folder",
    "mem": "memory",
    "mem_gb": "memory",
    "n": "nodes",
    "num_nodes": "nodes",
    "project": "account",
    "queue": "partition",
    "slurm_additional_parameters": "directives",
    "timeout_min": "time",
    "walltime": "time",
}
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_MEMORY = re.compile(r"\d+[KMGT]?")


@explain_arguments
@suggest_options
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Slurm(ScriptLauncher):
    """Engines on the nodes of a Slurm job. In a notebook that runs inside a job, ``Slurm()`` uses that job's nodes.

    partition, account, qos : as for ``sbatch``; without them, the site's defaults apply.
    nodes : number of nodes, by default one. Each runs one task, the agent, which starts that node's engines.
    gpus_per_node, cpus_per_task : GPUs and cores of each node.
    memory : of each node, as in "32G".
    time : limit of the job, in minutes or as in "02:00:00" and "1-12:00:00".
    setup : lines of shell before Python starts, such as ``["module load cuda", "source ~/env/bin/activate"]``.
    directives : further options of ``sbatch``, such as ``["--constraint=a100"]``.
    log_folder : where the job's output stays, on a file system that the nodes share. By default it is in
        ``~/.cache/dtkit`` until the cluster is closed.
    python : how the nodes start Python: a path, or a command such as "apptainer exec image.sif python". By default this
        notebook's Python, which the nodes have to share.
    job_name : by default the cluster's name, by which a further job avoids the nodes that are in use.
    address : of this machine, where the nodes reach it; by default that of the route to the nodes.
    checkpoint_minutes : minutes before the time limit at which a run writes a checkpoint. By default 5, or a quarter of
        a shorter limit. The checkpoint goes into the run's `checkpoint_dir`, by default below "checkpoints".
    requeue : whether the run then moves to a further job by itself, before the limit. For a moment, the notebook holds
        the data in memory. This needs ``on_failure="repair"``. A job that somebody cancels is never submitted again.

    A job is submitted if any of partition, account, qos, time, memory and directives is given, also inside a job.
    """

    name: ClassVar[str] = "Slurm"
    first_option: ClassVar[str] = "partition"
    has_time_limits: ClassVar[bool] = True
    other_words: ClassVar[Mapping[str, str]] = _OTHER_WORDS

    partition: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    time: str | int | None = None
    account: str | None = None
    qos: str | None = None
    setup: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    log_folder: str | None = None
    python: str | None = None
    job_name: str | None = None
    address: str | None = None
    checkpoint_minutes: float | None = None
    requeue: bool = False

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes)
        check_count("gpus_per_node", self.gpus_per_node, least=0)
        check_count("cpus_per_task", self.cpus_per_task)
        lines = ("partition", "account", "qos", "log_folder", "python", "job_name", "address")
        self.check_text_options(lines=lines, lists=("setup", "directives"))
        _check_time(self.time)
        minutes = self.checkpoint_minutes
        if minutes is not None and (isinstance(minutes, bool) or not isinstance(minutes, int | float) or minutes <= 0):
            raise ValueError(f"checkpoint_minutes={minutes!r}; it must be a number of minutes above 0, such as 5")
        for directive in self.directives:
            if not directive.startswith("-"):
                raise ValueError(f"directives: {directive!r} must be an option of sbatch, as in '--constraint=a100'")
        self._format_memory()

    # -- what is submitted ------------------------------------------------------------------------------------

    def script(self) -> Script:
        """Return the batch script that is submitted, or the lines that are run inside a job."""
        if self._joins_allocation:
            return self._format_step()
        return self._format_job(self.nodes or 1, self.job_name or "dtkit", [])

    def _format_job(self, nodes: int, job_name: str, busy_nodes: list[str]) -> Script:
        asked = {
            "job-name": job_name,
            "nodes": nodes,
            "ntasks-per-node": 1,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_task,
            "mem": self._format_memory(),
            "time": self.time,
            "exclude": ",".join(busy_nodes) or None,
            "output": self.log_path("%j"),
        }
        options = [f"--{option}={value}" for option, value in asked.items() if value is not None]
        # When a node is lost, Slurm neither ends the others nor starts the job again.
        options += ["--no-requeue", "--no-kill", *self.directives]
        directives = "".join(f"#SBATCH {option}\n" for option in options)
        return Script(f"#!/bin/bash\n{directives}\n{self._format_body()}")

    def _format_step(self) -> Script:
        """Return the script for an existing job. It starts a step on the job's nodes, next to other steps."""
        nodes = [] if self.nodes is None else [f"--nodes={self.nodes}"]
        gpus = [] if self.gpus_per_node is None else [f"--gpus-per-node={self.gpus_per_node}"]
        return Script(f"#!/bin/bash\n{self._format_body('--overlap', *nodes, '--ntasks-per-node=1', *gpus)}")

    def _format_body(self, *options: str) -> str:
        # Since Slurm 22.05, srun doesn't take this option from the job.
        cores = [] if self.cpus_per_task is None else [f"--cpus-per-task={self.cpus_per_task}"]
        srun = " ".join(["srun", *options, *cores, "--no-kill", "--kill-on-bad-exit=0"])
        setup = "".join(f"{line}\n" for line in self.setup)
        return f"{setup}{srun} {format_agent(self.python)}\n"

    def log_path(self, job_id: str) -> Path:
        """Return the file with the job's output."""
        folder = Path.home() / ".cache" / "dtkit" if self.log_folder is None else Path(self.log_folder).expanduser()
        return folder.absolute() / f"slurm-{job_id}.log"

    def _format_memory(self) -> str | None:
        """Return the memory as Slurm writes it: its units are powers of 1,024, and it doesn't know "GB"."""
        if self.memory is None or _MEMORY.fullmatch(str(self.memory)):
            return self.memory
        return f"{-(-formatting.parse_bytes(self.memory) // 2**20)}M"

    # -- agents -----------------------------------------------------------------------------------------------

    @property
    def _joins_allocation(self) -> bool:
        """Whether this notebook runs inside a job, and the options don't ask for another one."""
        asks = (self.partition, self.account, self.qos, self.time, self.memory, *self.directives)
        return "SLURM_JOB_ID" in os.environ and not any(asks)

    def list_hosts(self, num_engines: int) -> None:
        """Return None: Slurm chooses."""
        if num_engines < self.count_agents(num_engines):
            raise ValueError(
                f"{formatting.format_count(num_engines, 'engine')} on {self.nodes} nodes; each node needs at least "
                "one. Ask for more engines, or for fewer nodes"
            )

    def count_agents(self, num_engines: int) -> int:
        """Return the number of nodes."""
        del num_engines
        if self.nodes is None and self._joins_allocation:
            return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        return self.nodes or 1

    def get_controller_address(self) -> str:
        """Return the address from which this machine reaches a node."""
        if self.address is not None:
            return self.address
        nodes = list_node_names(self.partition)
        for node in nodes[:_MAX_TRIED_NODES]:
            if (address := find_route(node)) is not None:
                return address
        raise ClusterError(
            f"dtkit found no address of this machine that Slurm's nodes reach: their names ({', '.join(nodes[:3])}, "
            "...) can't be resolved here. Name the address of this machine: Slurm(address=...)"
        )

    def start_agents(self, request: AgentRequest) -> list[AgentJob]:
        """Submit the job, or a further one for engines that are missing."""
        if self._joins_allocation:
            inputs = {INPUT_VARIABLE: request.format_input()}
            step = SlurmStep.start("srun", self._format_step(), request.folder, inputs)
            step.job_id, step.checkpoint_minutes = os.environ["SLURM_JOB_ID"], self.checkpoint_minutes
            return [step]
        job_name = self.job_name or request.folder.name
        busy_nodes = _list_nodes_of(job_name)
        self._make_log_folder()
        script = self._format_job(request.num_agents, job_name, busy_nodes)
        job_id = submit_job(script, {INPUT_VARIABLE: request.format_input()})
        return [
            SlurmJob(
                job_id,
                self.log_path(job_id),
                is_log_temporary=self.log_folder is None,
                checkpoint_minutes=self.checkpoint_minutes,
                requeue=self.requeue,
            )
        ]

    def _make_log_folder(self) -> None:
        folder = self.log_path("0").parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"the folder {str(folder)!r} for the job's output can't be created: {error.strerror}. Choose another "
                "one with log_folder=, on a file system that the nodes share"
            ) from None

    def restore_job(self, fields: Mapping[str, Any]) -> AgentJob:
        """Return the job that `AgentJob.to_json` described."""
        return SlurmJob.from_json(fields) if "job_id" in fields else SlurmStep.from_json(fields)


_MAX_TRIED_NODES = 3


def find_route(host: str) -> str | None:
    """Return this machine's address on the route to a host, or None if the host's name is unknown. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket only chooses the route.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _list_nodes_of(job_name: str) -> list[str]:
    """Return the nodes on which jobs of this name run, as Slurm writes them. They can't have a second agent."""
    done = call_slurm(["squeue", "--noheader", "--me", f"--name={job_name}", "--states=RUNNING", "--format=%N"])
    return done.stdout.split()


def _check_time(value: str | int | None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return
    if value is not None and not (isinstance(value, str) and _TIME.fullmatch(value)):
        raise ValueError(f"time={value!r}; it must be minutes, or text such as '02:00:00' or '1-12:00:00'")

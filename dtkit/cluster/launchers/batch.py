"""Agents as jobs of PBS, LSF, HTCondor or SGE. ipyparallel knows the commands of these schedulers.

Each host is a job of its own. PBS is tested with its commands for Slurm (Debian's slurm-wlm-torque). SGE was tried by
hand with Grid Engine 8.1.9 on one host. LSF and HTCondor were never run. Tests check their scripts, and HTCondor's
Python bindings accepted its script.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ipyparallel.cluster import launcher as ipyparallel_launchers

from dtkit._util import files, timeouts
from dtkit._util.arguments import explain_arguments, suggest_options
from dtkit._util.formatting import sanitize_text
from dtkit.cluster.launchers.hosts import AgentJob, HostLauncher, JobState
from dtkit.cluster.launchers.script import (
    Script,
    check_count,
    check_line,
    find_refusal,
    format_agent_with_file,
    format_call,
    read_log_end,
)
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.cluster.launchers.hosts import AgentRequest

SYSTEMS = ("HTCondor", "LSF", "PBS", "SGE")
_MAX_ERROR_CHARS = 250
"""Of a refusal, whose end has the reason."""
_INPUT_SUFFIX = ".in"
_SHELL_TEMPLATE = """\
#!/bin/bash
{directives}
{program_and_args}
"""
_CONDOR_TEMPLATE = """\
universe = vanilla
executable = /bin/bash
transfer_executable = False
arguments = {script_file}
getenv = True
output = {output_file}
error = {output_file}
queue
"""
_DIRECTIVES = {  # the job's name, the environment, its output, and the queue if there is one
    "LSF": ("#BSUB -J dtkit", "#BSUB -env all", "#BSUB -o {output_file}", "#BSUB -q {queue}"),
    "PBS": ("#PBS -N dtkit", "#PBS -V", "#PBS -j oe", "#PBS -o {output_file}", "#PBS -q {queue}"),
    "SGE": ("#$ -N dtkit", "#$ -V", "#$ -S /bin/bash", "#$ -j y", "#$ -o {output_file}", "#$ -q {queue}"),
}


@explain_arguments
@suggest_options
@dataclasses.dataclass(frozen=True, repr=False)
class Batch(HostLauncher):
    """Engines on hosts that a scheduler gives: "PBS", "LSF", "HTCondor" or "SGE". LSF and HTCondor are untried.

    nodes : number of hosts; each one is a job. Ask for whole hosts in the template, since two agents can't share one.
    template : the script to submit, with ipyparallel's words. ``{program_and_args}`` becomes the agent's command, and
        ``{queue}`` and ``{output_file}`` become their values. For HTCondor, ``{script_file}`` becomes the path of a
        bash script that starts the agent. Its template should ask for memory and cores, too.
    queue : the scheduler's queue.
    log_folder : folder in which the jobs' output stays, on a file system that the hosts share. By default it is in
        ``~/.cache/dtkit`` until the cluster is closed.
    python : how hosts start Python: a path or a command. By default this notebook's Python, which hosts have to share.
    address : of this machine, where the hosts reach it.
    """

    name: ClassVar[str] = "Batch"
    one_agent_remedy: ClassVar[str] = (
        "ask for whole hosts in template=, such as `#PBS -l nodes=1:ppn=4` on hosts with four cores, or for fewer nodes"
    )

    system: str
    _: dataclasses.KW_ONLY
    address: str
    nodes: int = 1
    template: str | None = None
    queue: str | None = None
    log_folder: str | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise ValueError(f"{self.system!r} is not a scheduler that Batch knows; choose one of {', '.join(SYSTEMS)}")
        check_count("nodes", self.nodes)
        for option in ("address", "queue", "log_folder", "python"):
            if getattr(self, option) is not None:
                check_line(option, getattr(self, option))
        word = "{script_file}" if self.system == "HTCondor" else "{program_and_args}"
        if self.template is not None and word not in self.template:
            raise ValueError(f"template= starts no agent; put {word} on the line that names what runs on the host")

    def __repr__(self) -> str:
        return format_call(self)

    def script(self) -> Script:
        """Return the script that is submitted for each host."""
        return self._format(Path("dtkit-agent"))

    def _format(self, path: Path) -> Script:
        template = self.template
        if template is None and self.system == "HTCondor":
            template = _CONDOR_TEMPLATE
        elif template is None:
            lines = [line for line in _DIRECTIVES[self.system] if self.queue or "{queue}" not in line]
            template = _SHELL_TEMPLATE.replace("{directives}", "\n".join(lines))
        values = {
            "{program_and_args}": self._format_agent(path),
            "{output_file}": f"{path}.log",
            "{queue}": self.queue or "",
            "{script_file}": f"{path}.sh",
        }
        for word, value in values.items():  # other braces are the shell's
            template = template.replace(word, value)
        return Script(template)

    def _format_agent(self, path: Path) -> str:
        # Some schedulers show jobs' environments to all users, so the key is in a file.
        return format_agent_with_file(self.python, path.with_suffix(_INPUT_SUFFIX))

    # -- agents -----------------------------------------------------------------------------------------------

    def list_hosts(self, num_engines: int) -> None:
        """Return None: the scheduler chooses."""
        if num_engines < self.nodes:
            raise ValueError(
                f"{num_engines} engines on {self.nodes} hosts; each host needs at least one. Ask for more engines, or "
                "for fewer nodes"
            )

    def count_agents(self, num_engines: int) -> int:
        """Return the number of jobs."""
        del num_engines
        return self.nodes

    def get_controller_address(self) -> str:
        """Return the address that the user named."""
        return self.address

    def start_agents(self, request: AgentRequest) -> list[AgentJob]:
        """Submit a job for each host."""
        folder = Path.home() / ".cache" / "dtkit" if self.log_folder is None else Path(self.log_folder).expanduser()
        folder = folder.absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        jobs: list[AgentJob] = []
        try:
            for _ in range(request.num_agents):
                path = folder / f"{request.folder.name}-{os.urandom(3).hex()}"
                jobs.append(self._submit(path, request.format_input()))
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
        return jobs

    def _submit(self, path: Path, agent_input: str) -> BatchJob:
        try:
            job_id = self._write_and_submit(path, agent_input)
        except BaseException:
            _remove_scripts(path)
            raise
        return BatchJob(self.system, job_id, f"{path}.log", is_log_temporary=self.log_folder is None)

    def _write_and_submit(self, path: Path, agent_input: str) -> str:
        files.replace_file(path.with_suffix(_INPUT_SUFFIX), agent_input)
        script = path.with_suffix(".batch")
        script.write_text(self._format(path))
        if self.system == "HTCondor":
            path.with_suffix(".sh").write_text(f"{self._format_agent(path)}\n")
        launcher = _get_ipyparallel_launcher(self.system)
        if self.system == "LSF":  # bsub reads its directives from standard input only
            done = _call(launcher.submit_command, script.read_text())
        else:
            # Slurm's qsub ignores these two in a script.
            output = ["-j", "oe", "-o", f"{path}.log"] if self.system == "PBS" else []
            done = _call([*launcher.submit_command, *output, str(script)])
        match = launcher.job_id_regexp.search(done.stdout)
        if done.returncode or match is None:
            text = (done.stderr or done.stdout).strip()
            raise ClusterError(f"{self.system} refused the job: {sanitize_text(text[-_MAX_ERROR_CHARS:])}")
        return str(match.group(launcher.job_id_regexp_group))

    def restore_job(self, fields: Mapping[str, Any]) -> AgentJob:
        """Return the job that `AgentJob.to_json` described."""
        return BatchJob(**fields)


class BatchJob(AgentJob):
    """A job by its id. Its output goes with it if it is temporary."""

    def __init__(self, system: str, job_id: str, log: str, *, is_log_temporary: bool = False) -> None:
        self._system, self._job_id, self._log, self._is_log_temporary = system, job_id, log, is_log_temporary

    def get_state(self) -> JobState:
        """Ask the scheduler, which forgets jobs that have ended."""
        if (refusal := find_refusal(Path(self._log))) is not None:
            return JobState("ended", f"{self._system} job {self._job_id}: {refusal}")
        done = _call([word.format(self._job_id) for word in _STATUS_COMMANDS[self._system]])
        if (command := find_stuck(self._system, self._job_id, done.stdout)) is not None:
            text = f"{self._system} job {self._job_id} had an error and would wait forever; `{command}` shows it"
            return JobState("ended", text)
        phase = read_phase(self._system, self._job_id, done.stdout)
        log = "" if phase != "ended" else f". {read_log_end(Path(self._log))}"
        return JobState(phase, f"{self._system} job {self._job_id} {_PHASES[phase]}{log}")

    def cancel(self) -> None:
        """Delete the job and its files; the scheduler ends its processes."""
        _call([*_get_ipyparallel_launcher(self._system).delete_command, self._job_id])
        _remove_scripts(Path(self._log).with_suffix(""))
        if self._is_log_temporary:
            Path(self._log).unlink(missing_ok=True)

    def to_json(self) -> dict[str, Any]:
        """Return what restores this object."""
        return {
            "system": self._system,
            "job_id": self._job_id,
            "log": self._log,
            "is_log_temporary": self._is_log_temporary,
        }


def _remove_scripts(path: Path) -> None:
    for suffix in (".batch", ".sh", _INPUT_SUFFIX):
        path.with_suffix(suffix).unlink(missing_ok=True)


_STATUS_COMMANDS = {
    "HTCondor": ("condor_q", "{}", "-format", "%d\n", "JobStatus"),
    "LSF": ("bjobs", "-noheader", "-o", "stat", "{}"),
    "PBS": ("qstat", "-f", "{}"),
    "SGE": ("qstat",),
}
_PHASES = {"waiting": "is waiting", "running": "is running", "ended": "has ended"}
_STUCK = {  # system -> (output for a job that waits forever after an error, command that shows the error)
    "HTCondor": (r"^5$", "condor_q -hold {}"),
    "SGE": (r"^\s*{}\s+\S+\s+\S+\s+\S+\s+\w*E\w*\s", "qstat -j {}"),
}
_WAITING = {
    "HTCondor": r"^1$",  # idle
    "LSF": r"^(PEND|PSUSP|WAIT)",
    "PBS": r"job_state = [QHWT]",
    "SGE": r"^\s*{}\s+\S+\s+\S+\s+\S+\s+(h?qw)\s",
}
_RUNNING = {
    "HTCondor": r"^[27]$",  # running, suspended
    "LSF": r"^(RUN|USUSP|SSUSP|PROV|UNKWN)",
    "PBS": r"job_state = [REBS]",
    "SGE": r"^\s*{}\s+\S+\s+\S+\s+\S+\s+(t|r|R|s|S)\w*\s",
}


def find_stuck(system: str, job_id: str, text: str) -> str | None:
    """Return the command that shows why a job can't start, if the status says that it needs help; else None."""
    if system not in _STUCK:
        return None
    pattern, command = _STUCK[system]
    return command.format(job_id) if re.search(pattern.replace("{}", job_id), text, re.MULTILINE) else None


def read_phase(system: str, job_id: str, text: str) -> Literal["waiting", "running", "ended"]:
    """Return a job's phase from the output of a scheduler's status command."""
    if re.search(_WAITING[system].replace("{}", job_id), text, re.MULTILINE):
        return "waiting"
    return "running" if re.search(_RUNNING[system].replace("{}", job_id), text, re.MULTILINE) else "ended"


def _get_ipyparallel_launcher(system: str) -> Any:
    """Return ipyparallel's object for a scheduler, which knows its commands and the form of its ids."""
    return getattr(ipyparallel_launchers, f"{system}EngineSetLauncher")()


def _call(command: list[str], script: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise ClusterError(f"{command[0]} is not on this notebook's PATH. Start the notebook where the scheduler is")
    return subprocess.run(
        command,
        input=script,
        stdin=subprocess.DEVNULL if script is None else None,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeouts.SLURM_COMMAND_TIMEOUT_S,
    )

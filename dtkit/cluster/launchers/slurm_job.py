"""One Slurm job, which is submitted, watched and canceled by Slurm's own commands.

The state comes from ``squeue``, which also knows jobs that ended some minutes ago, and needs no accounting database.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.deadline import wait_until
from dtkit._util.formatting import sanitize_text
from dtkit._util.process import ProcessId
from dtkit.cluster.launchers.hosts import AgentJob, JobState
from dtkit.cluster.launchers.process_job import ProcessJob
from dtkit.cluster.launchers.script import find_refusal, read_log_end
from dtkit.errors import ClusterError
from dtkit.rpc.job_end import JobEnd

if TYPE_CHECKING:
    from collections.abc import Mapping

_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"}
_ACTIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
_MAY_FOLLOW = {"TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"}
"""Ends after which `requeue` submits a further job. A job that somebody canceled is not among them."""
_HOPELESS = {  # reason -> what to do; Slurm would wait forever
    "BadConstraints": "no node has what it asks for",
    "PartitionConfig": "the partition doesn't give what it asks for",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "PartitionTimeLimit": "time= is longer than the partition allows",
}


@dataclasses.dataclass(frozen=True)
class QueueState:
    """State of a job in Slurm's queue."""

    state: str
    """Slurm's word, such as PENDING, RUNNING, TIMEOUT, or UNKNOWN after Slurm has forgotten the job."""
    reason: str = ""
    time_left_s: float | None = None
    """Seconds until the time limit; None without one, and before the job runs."""
    time_limit_s: float | None = None
    nodes: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the job is in the queue."""
        return self.state in _WAITING

    @property
    def is_running(self) -> bool:
        """Whether its processes can run."""
        return self.state in _ACTIVE

    def __str__(self) -> str:
        has_reason = self.reason and self.reason not in ("None", self.state)
        return f"{self.state} ({self.reason})" if has_reason else self.state


class SlurmJob(AgentJob):
    """A job by its id. `log` has its output, and goes with it if it is `temporary`."""

    def __init__(
        self,
        job_id: str,
        log: Path,
        *,
        is_log_temporary: bool = False,
        checkpoint_minutes: float | None = None,
        requeue: bool = False,
    ) -> None:
        self.job_id, self.log, self._is_log_temporary = job_id, log, is_log_temporary
        self._checkpoint_minutes, self._requeue = checkpoint_minutes, requeue
        self._is_ended_early = False
        self._state, self._asked_at = JobState("waiting", f"Slurm job {job_id} is submitted"), -math.inf

    def __repr__(self) -> str:
        return f"SlurmJob({self.job_id!r})"

    def get_state(self) -> JobState:
        """Return the phase, with id, state and reason. Queries Slurm only now and then."""
        if time.monotonic() - self._asked_at >= timeouts.SLURM_POLL_S:
            try:
                self._state = self._describe(self.query())
            except ClusterError as error:  # while Slurm's controller restarts, the job keeps its place in the queue
                self._state = JobState(self._state.phase, f"Slurm job {self.job_id}: {error}")
            self._asked_at = time.monotonic()
        return self._state

    def _describe(self, now: QueueState) -> JobState:
        text = f"Slurm job {self.job_id} is {now}"
        if now.is_waiting and now.reason in _HOPELESS:
            advice = f"{_HOPELESS[now.reason]}. {describe_partitions()}"
            return JobState("ended", f"{text}, and would stay there: {advice}")
        if now.is_waiting:
            return JobState("waiting", text)
        if (refusal := find_refusal(self.log)) is not None:
            return JobState("ended", f"{text}. {refusal}")
        if now.is_running and now.state != "COMPLETING":
            return JobState("running", text)
        if now.state in _MAY_FOLLOW or now.state == "CANCELLED":  # its output has no cause
            return JobState("ended", text)
        return JobState("ended", f"{text}. {read_log_end(self.log)}")

    def get_end(self) -> JobEnd | None:
        """Ask Slurm how long the job may run."""
        return make_job_end(self.job_id, self.query(), self._checkpoint_minutes, requeue=self._requeue)

    def describe_end(self) -> str:
        """Ask Slurm now. Wait while it ends the job's processes, since it names the reason only afterwards."""
        with contextlib.suppress(ClusterError):
            self._state = self._describe(self._query_end(timeouts.KILL_TIMEOUT_S))
            self._asked_at = time.monotonic()
        return super().describe_end()

    def explain_end(self) -> str | None:
        """Return Slurm's word for the end; None if a further job shall take this one's place."""
        now = self._query_end(timeouts.SLURM_CANCEL_TIMEOUT_S)
        if now.is_waiting or (now.is_running and now.state != "COMPLETING"):
            return None
        if self._is_ended_early or (self._requeue and now.state in _MAY_FOLLOW):
            return None
        return f"Slurm job {self.job_id} is {now}"

    def end_early(self) -> None:
        """Cancel the job, and let a further one take its place."""
        self._is_ended_early = True
        self.cancel()

    def to_json(self) -> dict[str, Any]:
        """Return what restores this object."""
        return {
            "job_id": self.job_id,
            "log": str(self.log),
            "is_log_temporary": self._is_log_temporary,
            "checkpoint_minutes": self._checkpoint_minutes,
            "requeue": self._requeue,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SlurmJob:
        """Return what `to_json` described."""
        return cls(**{**fields, "log": Path(fields["log"])})

    def query(self) -> QueueState:
        """Ask Slurm for the state. Raises ClusterError if Slurm doesn't answer."""
        return query_job(self.job_id)

    def _query_end(self, timeout: float) -> QueueState:
        """Return the state, as soon as it is another one than COMPLETING."""
        now = self.query()

        def has_reason() -> bool:
            nonlocal now
            now = self.query()
            return now.state != "COMPLETING"

        if now.state == "COMPLETING":
            wait_until(has_reason, timeout, timeouts.SLURM_CANCEL_POLL_S)
        return now

    def cancel(self) -> None:
        """End the job, and wait until Slurm has ended its processes. No-op for one that has ended."""
        call_slurm(["scancel", self.job_id])
        self._asked_at = -math.inf
        # Slurm kills what ignores SIGTERM after its KillWait, 30 s by default.
        wait_until(self._has_ended, timeouts.SLURM_CANCEL_TIMEOUT_S, timeouts.SLURM_CANCEL_POLL_S)
        if self._is_log_temporary:
            self.log.unlink(missing_ok=True)

    def _has_ended(self) -> bool:
        state = self.query()
        return not state.is_waiting and not state.is_running


class SlurmStep(ProcessJob):
    """A step on the nodes of the job in which this notebook runs."""

    job_id = ""
    checkpoint_minutes: float | None = None

    def get_end(self) -> JobEnd | None:
        """Ask Slurm how long the notebook's job may run."""
        return make_job_end(self.job_id, query_job(self.job_id), self.checkpoint_minutes, requeue=False)

    def to_json(self) -> dict[str, Any]:
        """Return what restores this object."""
        return {**super().to_json(), "step_of": self.job_id, "checkpoint_minutes": self.checkpoint_minutes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SlurmStep:
        """Return what `to_json` described."""
        step = cls(ProcessId(*fields["process"]), fields["name"], Path(fields["log"]))
        step.job_id, step.checkpoint_minutes = fields["step_of"], fields["checkpoint_minutes"]
        return step


def make_job_end(job_id: str, now: QueueState, checkpoint_minutes: float | None, *, requeue: bool) -> JobEnd | None:
    """Return the end of a running job; None without a time limit.

    By default, a short job has a checkpoint in the last quarter of its time.
    """
    if now.time_left_s is None:
        return None
    if checkpoint_minutes is not None:
        before_s = 60 * checkpoint_minutes
    else:
        before_s = min(timeouts.TIME_LIMIT_CHECKPOINT_S, (now.time_limit_s or math.inf) / 4)
    return JobEnd(f"Slurm job {job_id}", now.time_left_s, before_s, is_followed=requeue)


def query_job(job_id: str) -> QueueState:
    """Ask Slurm for the state of a job. Raises ClusterError if Slurm doesn't answer."""
    done = call_slurm(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r|%L|%l|%N"])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise ClusterError(f"squeue can't report the state of job {job_id}: {_format_error(done.stderr)}")
    first = done.stdout.partition("\n")[0]
    if not first:
        return QueueState("UNKNOWN", "Slurm has forgotten it")
    state, reason, time_left, time_limit, nodes = first.split("|")
    left_s = parse_time(time_left) if state in _ACTIVE else None
    return QueueState(state, reason, left_s, parse_time(time_limit), nodes)


def submit_job(script: str, environment: Mapping[str, str]) -> str:
    """Submit a batch script, and return the job's id. It inherits this process's environment, which no command line
    shows.

    Raises ClusterError with Slurm's words if it refuses the script.
    """
    done = call_slurm(["sbatch", "--parsable"], script=script, environment=environment)
    if done.returncode:
        raise ClusterError(f"Slurm refused the job: {_format_error(done.stderr)}. {describe_partitions()}")
    return done.stdout.strip().partition(";")[0]  # of a federation: "id;cluster"


def call_slurm(
    command: list[str], *, script: str | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises ClusterError if it is missing or doesn't answer."""
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"{command[0]} is not on this notebook's PATH. Start the notebook where Slurm's commands are, such as on a "
            "login node, or add their folder to PATH"
        )
    try:
        return subprocess.run(
            command,
            input=script,
            stdin=subprocess.DEVNULL if script is None else None,
            env={**_drop_allocation(os.environ), **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeouts.SLURM_COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"{command[0]} did not answer within {timeouts.SLURM_COMMAND_TIMEOUT_S:g} s; Slurm's controller may be "
            "overloaded or down. Try `sinfo` in a terminal"
        ) from None


def _drop_allocation(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of the job in which this notebook may run."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name in kept}


def list_node_names(partition: str | None) -> list[str]:
    """Return the names of the nodes of a partition, by default of all. Raises ClusterError if there are none."""
    only = [] if partition is None else [f"--partition={partition}"]
    done = call_slurm(["sinfo", "--noheader", "--Node", "--format=%o", *only])
    if done.returncode or done.stderr.strip():
        raise ClusterError(
            f"sinfo can't list Slurm's nodes: {_format_error(done.stderr)}. Slurm's controller may be down, or this "
            "machine's configuration of it wrong: try `sinfo` in a terminal"
        )
    if not (names := done.stdout.split()):
        what = "Slurm has no nodes" if partition is None else f"partition={partition!r} has no nodes, or doesn't exist"
        raise ClusterError(f"{what}. {describe_partitions()}")
    return names


def describe_partitions() -> str:
    """Return a sentence that lists the partitions and the resources of their nodes."""
    done = call_slurm(["sinfo", "--noheader", "--format=%R|%D|%c|%m|%G|%l"])
    partitions = []
    for line in done.stdout.splitlines():
        name, nodes, cores, memory, gpus, limit = line.split("|")
        devices = "" if gpus in ("(null)", "N/A") else f", {gpus}"
        partitions.append(f"{name} ({nodes} nodes with {cores} cores, {memory} MB{devices}; up to {limit})")
    return f"Partitions here: {'; '.join(partitions)}" if partitions else "`sinfo` lists no partition"


def parse_time(text: str) -> float | None:
    """Return the seconds of Slurm's ``days-hours:minutes:seconds``, or None for a word such as UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + seconds


def _format_error(stderr: str) -> str:
    """Return the most specific line of the errors that a Slurm command printed."""
    lines = [
        re.sub(r"^\w+: (error|fatal): (Batch job submission failed: )?", "", line.strip())
        for line in stderr.splitlines()
        if line.strip() and "munged is up" not in line  # an advice that comes before the error
    ]
    return sanitize_text(lines[0].rstrip(".")) if lines else "it gave no reason"

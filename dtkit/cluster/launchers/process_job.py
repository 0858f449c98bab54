"""Agents that one process of this machine runs, such as ``mpirun`` or ``srun``."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from dtkit._util import timeouts
from dtkit._util.process import ProcessId
from dtkit.cluster.launchers.hosts import AgentJob, JobState
from dtkit.cluster.launchers.script import find_refusal, read_log_end

if TYPE_CHECKING:
    from collections.abc import Mapping


class ProcessJob(AgentJob):
    """A process that runs agents for as long as it lives."""

    def __init__(self, process: ProcessId, name: str, log: Path) -> None:
        self._process, self._name, self._log = process, name, log
        self._popen: subprocess.Popen[bytes] | None = None  # only in the notebook that started it

    @classmethod
    def start(cls, name: str, script: str, folder: Path, inputs: Mapping[str, str]) -> Self:
        """Run a bash script that starts the agents. `inputs` are environment variables.

        The reaper of the cluster with this folder ends it with the cluster.
        """
        log = folder / "log" / f"{name}-{os.urandom(3).hex()}.log"
        log.parent.mkdir(mode=0o700, exist_ok=True)
        with log.open("wb") as file:
            popen = subprocess.Popen(
                ["/bin/bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "IPP_PROFILE_DIR": str(folder), **inputs},
                start_new_session=True,  # so that an interrupt of the notebook doesn't reach it
            )
        job = cls(ProcessId.from_pid(popen.pid), name, log)
        job._popen = popen
        return job

    def get_state(self) -> JobState:
        """Return whether the process runs, or the end of its output."""
        code = None if self._popen is None else self._popen.poll()  # also reaps it
        if (refusal := find_refusal(self._log)) is not None:
            return JobState("ended", f"{self._name} can't start all agents. {refusal}")
        if self._process.is_alive:
            return JobState("running", f"{self._name} runs with pid {self._process.pid}")
        ending = "" if code is None else f" with exit code {code}"
        return JobState("ended", f"{self._name} has ended{ending}. {read_log_end(self._log)}")

    def cancel(self) -> None:
        """End the process, which ends its agents."""
        processes = self._list_processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=timeouts.TERM_GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=timeouts.KILL_TIMEOUT_S)
        if self._popen is not None:
            self._popen.poll()

    def list_pids(self) -> list[int]:
        """Return the process and its children on this machine."""
        return [process.pid for process in self._list_processes()]

    def _list_processes(self) -> list[psutil.Process]:
        process = self._process.find()
        if process is None:
            return []
        try:
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def to_json(self) -> dict[str, Any]:
        """Return what restores this object."""
        process = [self._process.pid, self._process.start_time]
        return {"process": process, "name": self._name, "log": str(self._log)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ProcessJob:
        """Return what `to_json` described."""
        return cls(ProcessId(*fields["process"]), fields["name"], Path(fields["log"]))

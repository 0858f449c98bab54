"""Interface of launchers for several hosts. A launcher starts one agent on each host, and knows the jobs that run them.

An agent is ``PYTHON -m dtkit.cluster.agent``. It reads one line of JSON from its standard input, or from the file that
the environment variable ``DTKIT_AGENT_FILE`` names. The line holds the cluster's keys. It must never be part of a
command line, which other users can read. The agent starts and ends the engines of its host
(:mod:`dtkit.cluster.agent`).

A launcher is a frozen dataclass of plain values, because the cluster file stores it for :func:`dtkit.attach`.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dtkit._util.completion import list_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dtkit.rpc.job_end import JobEnd

AGENT_MODULE = "dtkit.cluster.agent"
AGENT_FILE_VARIABLE = "DTKIT_AGENT_FILE"
REFUSAL = "dtkit agent: "
"""Begins the line that an agent prints if it can't start."""


@dataclasses.dataclass(frozen=True)
class AgentRequest:
    """Agents to start."""

    folder: Path
    """The cluster's private folder, for scripts and logs. Other hosts may not see it."""
    connection: Mapping[str, Any]
    """Addresses and keys of ipyparallel's controller. They are secret."""
    num_engines: int
    """Engines that these agents will start, together."""
    num_agents: int
    """Agents to start, each on a host of its own."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts, as `list_hosts` gives them; empty if the scheduler chooses."""

    def format_input(self, host: str = "", connection: Mapping[str, Any] | None = None) -> str:
        """Return the line that an agent reads, with another `connection` where ports are forwarded."""
        fields = {"connection": dict(connection or self.connection), "host": host, "cluster": self.folder.name}
        return json.dumps(fields) + "\n"


@dataclasses.dataclass(frozen=True)
class JobState:
    """State of what runs agents."""

    phase: Literal["waiting", "running", "ended"]
    text: str
    """Id, state and reason for the user, such as ``job 17 is PENDING (Resources)``."""


class AgentJob(abc.ABC):
    """One process, or one job of a scheduler, that runs the agents of one or several hosts."""

    host: str = ""
    """Name of the host whose connection it is; empty for a job that runs agents on hosts of its own choice."""

    @property
    def has_ended(self) -> bool:
        """Whether this connection has ended, and by that the agent. Takes no time."""
        return False

    @abc.abstractmethod
    def get_state(self) -> JobState:
        """Return its state, in a second or less."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """End it with its agents. Idempotent."""

    def get_end(self) -> JobEnd | None:
        """Return when a scheduler will end it; None without a time limit. Raises ClusterError."""
        return None

    def describe_end(self) -> str:
        """Return its state for a user who has lost its engines; empty if it has not ended."""
        state = self.get_state()
        return state.text.partition(". ")[0] if state.phase == "ended" else ""

    def explain_end(self) -> str | None:
        """Return why a scheduler has ended it, if no further job should take its place; else None."""
        return None

    def end_early(self) -> None:
        """End it before its time. A further job takes its place."""
        self.cancel()

    def list_pids(self) -> list[int]:
        """Return the processes of this machine that must live as long as the agents."""
        return []

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return what `HostLauncher.restore_job` needs after the notebook's kernel was restarted."""


class HostLauncher(abc.ABC):
    """Starts agents on hosts. Its fields are the user's choices."""

    name: ClassVar[str]
    """Name of the class among dtkit's public names."""
    has_time_limits: ClassVar[bool] = False
    """Whether a scheduler may end its jobs at a time that is known before."""
    one_agent_remedy: ClassVar[str] = "name each host once, with all its engines, as in 'gpu1:4'"
    """What to do if two agents run on one host."""

    def __dir__(self) -> list[str]:
        """Return the options, and methods for users, for the Tab key."""
        return list_options(self, ("script", "count_agents"))

    @abc.abstractmethod
    def get_controller_address(self) -> str:
        """Return the only address on which the controller listens: 127.0.0.1 if agents connect through a tunnel."""

    @abc.abstractmethod
    def list_hosts(self, num_engines: int) -> dict[str, int] | None:
        """Return the engines of each host that is needed, in order of rank; None if a scheduler chooses the hosts.

        Raises ValueError if there are too few slots.
        """

    @abc.abstractmethod
    def start_agents(self, request: AgentRequest) -> list[AgentJob]:
        """Start agents without waiting for them to connect. Raises ClusterError."""

    @abc.abstractmethod
    def restore_job(self, fields: Mapping[str, Any]) -> AgentJob:
        """Return the job that `AgentJob.to_json` described, in another process."""

    @abc.abstractmethod
    def script(self) -> str:
        """Return what will be run or submitted, as text for the user, without secrets."""

    def count_agents(self, num_engines: int) -> int:
        """Return the number of agents for so many engines. Each agent is on a host of its own."""
        hosts = self.list_hosts(num_engines)
        return 1 if hosts is None else len(hosts)

    def divide_engines(self, num_engines: int, hosts: Sequence[str]) -> list[int]:
        """Return how many engines each host gets. `hosts` are the agents that have connected, in order."""
        slots = self.list_hosts(num_engines)
        if slots is not None:
            return [slots.get(host, 0) for host in hosts]
        return divide_evenly(num_engines, len(hosts))

    def to_json(self) -> dict[str, Any]:
        """Return the fields for the cluster file, with the name of the class."""
        return {"name": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]  # each one is a dataclass


def divide_evenly(num_engines: int, num_hosts: int) -> list[int]:
    """Return how many engines each host gets. The first hosts get one more if the number doesn't divide evenly."""
    least, more = divmod(num_engines, num_hosts)
    return [least + (k < more) for k in range(num_hosts)]

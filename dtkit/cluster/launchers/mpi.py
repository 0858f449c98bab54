"""Agents that ``mpirun`` starts, one on each host. Engines are not MPI processes, so losing one engine doesn't end the
others.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import shlex
import shutil
from typing import TYPE_CHECKING, Any, ClassVar

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments, suggest_options
from dtkit.cluster.launchers.process_job import ProcessJob
from dtkit.cluster.launchers.script import INPUT_VARIABLE, Script, ScriptLauncher, format_agent
from dtkit.cluster.launchers.slurm import find_route
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.cluster.launchers.hosts import AgentJob, AgentRequest


@explain_arguments
@suggest_options
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MPI(ScriptLauncher):
    """Engines on hosts that ``mpirun`` of Open MPI reaches.

    hosts : names with numbers of engines, as in ``["gpu1:4", "gpu2:4"]``; without a number, one engine.
    arguments : further options of ``mpirun``, such as ``["--mca", "plm_rsh_args", "-p 2222"]``.
    setup : lines of shell before ``mpirun``, such as ``["module load openmpi"]``.
    python : how hosts start Python: a path or a command. By default this notebook's Python, which hosts have to share.
    mpirun : the program.
    address : of this machine, where the hosts reach it; by default that of the route to the first one.
    """

    name: ClassVar[str] = "MPI"
    first_option: ClassVar[str] = "hosts"
    other_words: ClassVar[Mapping[str, str]] = {
        "host": "hosts",
        "hostfile": "arguments",
        "args": "arguments",
        "launcher": "mpirun",
    }

    hosts: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str | None = None
    mpirun: str = "mpirun"
    address: str | None = None

    def __post_init__(self) -> None:
        self.check_text_options(lines=("python", "mpirun", "address"), lists=("hosts", "arguments", "setup"))
        if not self.hosts:
            raise ValueError(
                "hosts=() names no host; list them with their numbers of engines, as in ['gpu1:4', 'gpu2:4']"
            )
        self._count_slots()

    def _count_slots(self) -> dict[str, int]:
        slots: collections.Counter[str] = collections.Counter()
        for entry in self.hosts:
            host, _, number = entry.partition(":")
            if not host or not (number or "1").isdecimal() or int(number or 1) < 1:
                raise ValueError(f"hosts: {entry!r} must be a name, or a name and a number of engines, as in 'gpu1:4'")
            slots[host] += int(number or 1)
        return dict(slots)

    # -- what is run ------------------------------------------------------------------------------------------

    def script(self) -> Script:
        """Return the lines that are run on this machine."""
        return self._format(list(self._count_slots()))

    def _format(self, hosts: Sequence[str]) -> Script:
        """Return the command, in Open MPI's form for several programs, since each agent gets the name of its host."""
        # The end of one agent must not end the others.
        options = ["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0", *self.arguments]
        if os.getuid() == 0:
            options.append("--allow-run-as-root")
        agents = [
            f"-np 1 --host {shlex.quote(host)} -x {_name_input(k)} {format_agent(self.python, _name_input(k))}"
            for k, host in enumerate(hosts)
        ]
        setup = "".join(f"{line}\n" for line in self.setup)
        return Script(f"{setup}exec {self.mpirun} {shlex.join(options)} {' : '.join(agents)}\n")

    # -- agents -----------------------------------------------------------------------------------------------

    def list_hosts(self, num_engines: int) -> dict[str, int]:
        """Return the engines of each host, filled in order."""
        needed: dict[str, int] = {}
        for host, slots in self._count_slots().items():
            if num_engines > 0:
                needed[host] = min(slots, num_engines)
                num_engines -= needed[host]
        if num_engines > 0:
            total = sum(self._count_slots().values())
            raise ValueError(
                f"{formatting.format_count(total + num_engines, 'engine')}, but hosts={list(self.hosts)!r} has room "
                f"for {total}. Raise the numbers behind the names, or start fewer engines"
            )
        return needed

    def get_controller_address(self) -> str:
        """Return the address from which this machine reaches the first host."""
        if self.address is not None:
            return self.address
        for host in self._count_slots():
            if (address := find_route(host)) is not None:
                return address
        raise ClusterError(
            f"dtkit found no address of this machine that {self.hosts[0]} reaches: its name can't be resolved here. "
            "Name the address of this machine: MPI(hosts=..., address=...)"
        )

    def start_agents(self, request: AgentRequest) -> list[AgentJob]:
        """Start ``mpirun``, with an agent on each host of the request."""
        if not self.setup and shutil.which(self.mpirun) is None:
            raise ClusterError(
                f"{self.mpirun} is not on this notebook's PATH. Install Open MPI, load its module with setup=, or name "
                "the program with mpirun="
            )
        hosts = request.hosts or tuple(self.list_hosts(request.num_engines))
        inputs = {_name_input(k): request.format_input(host) for k, host in enumerate(hosts)}
        return [ProcessJob.start("mpirun", self._format(hosts), request.folder, inputs)]

    def restore_job(self, fields: Mapping[str, Any]) -> AgentJob:
        """Return the job that `AgentJob.to_json` described."""
        return ProcessJob.from_json(fields)


def _name_input(index: int) -> str:
    return f"{INPUT_VARIABLE}_{index}"

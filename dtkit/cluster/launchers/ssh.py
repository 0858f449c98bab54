"""Hosts by SSH. One connection per host forwards the controller's ports and runs the agent.

The controller listens only on loopback, and so do the forwarded ports on each host. No port is open to a network. The
keys travel on the standard input of ssh. When the connection ends, the agent's output is closed and the agent ends; see
:mod:`dtkit.cluster.agent.hangup`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import psutil

from dtkit._util import timeouts
from dtkit._util.arguments import explain_arguments, suggest_options
from dtkit._util.process import ProcessId
from dtkit.cluster.launchers.hosts import AGENT_MODULE, REFUSAL, AgentJob, AgentRequest, HostLauncher, JobState
from dtkit.cluster.launchers.remedies import PORT_TAKEN, find_remedy
from dtkit.cluster.reaper import MARKER_VARIABLE
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LOOPBACK = "127.0.0.1"
_FIRST_PORT, _LAST_PORT = 20000, 32000  # below the range from which systems choose clients' ports
_MAX_LOG_BYTES = 2000
_MAX_SILENT_CHECKS = 4
_NANNY = "[KernelNanny"


@explain_arguments
@suggest_options
@dataclasses.dataclass(frozen=True)
class SSH(HostLauncher):
    """Engines on hosts that the notebook reaches by SSH without a password.

    Each host needs dtkit and torch in the notebook's versions, and no open port besides SSH's. The hosts must reach
    each other; the tensors that travel between them are not encrypted.

    Parameters
    ----------
    hosts
        Names with the number of engines, as in ``["gpu1:4", "gpu2:4"]``. Or the path of a file with one host a line,
        as in ``gpu1:4`` or ``gpu1 slots=4``. A name is what ``ssh`` accepts, so that users, ports, keys and jump hosts
        come from ``~/.ssh/config``. A host without a number gets one engine.
    python
        Command that runs Python on the hosts. It may have several words, as in ``apptainer exec img.sif python``.
        ``~`` is the user's folder on the host.
    ssh_options
        Further options of ``ssh``, as in ``["-F", "~/cluster.ssh"]``.

    """

    name: ClassVar[str] = "SSH"

    hosts: Sequence[str] | str | os.PathLike[str]
    python: str = "python3"
    ssh_options: Sequence[str] = ()

    def __post_init__(self) -> None:
        lines = (
            _read_host_file(os.fspath(self.hosts)) if isinstance(self.hosts, str | os.PathLike) else list(self.hosts)
        )
        slots = dict(_parse_host(line) for line in lines)
        if not slots or len(slots) < len(lines):
            raise ValueError(
                f"SSH({self.hosts!r}): give each host once, with its number of engines, as in SSH(['gpu1:4', 'gpu2:4'])"
            )
        if not isinstance(self.python, str) or not self.python.strip():
            raise ValueError(f"SSH(python={self.python!r}): give the command that runs Python on the hosts")
        object.__setattr__(self, "hosts", tuple(f"{host}:{count}" for host, count in slots.items()))
        object.__setattr__(self, "ssh_options", tuple(self.ssh_options))

    @property
    def _host_lines(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self.hosts)

    @property
    def slots(self) -> dict[str, int]:
        """Number of engines by host."""
        return dict(_parse_host(text) for text in self._host_lines)

    def get_controller_address(self) -> str:
        """Return loopback: agents come by forwarded ports."""
        return _LOOPBACK

    def list_hosts(self, num_engines: int) -> dict[str, int]:
        """Fill one host after the other. Raises ValueError if all together have too few engines."""
        if num_engines > sum(self.slots.values()):
            raise ValueError(
                f"Cluster({num_engines}): {', '.join(self._host_lines)} have {sum(self.slots.values())} engines "
                "together. Ask for fewer engines, or give the hosts larger numbers"
            )
        chosen = {}
        for host, count in self.slots.items():
            if num_engines > 0:
                chosen[host] = min(count, num_engines)
                num_engines -= count
        return chosen

    def start_agents(self, request: AgentRequest) -> list[AgentJob]:
        """Start one connection for each host."""
        if shutil.which("ssh") is None:
            raise ClusterError("`ssh` is not on this notebook's PATH; install OpenSSH's client")
        return [SSHConnection.start(self, request, host) for host in request.hosts]

    def restore_job(self, fields: Mapping[str, Any]) -> AgentJob:
        """Return a connection that another notebook started."""
        return SSHConnection(str(fields["host"]), ProcessId(**fields["process"]), Path(fields["log"]))

    def script(self) -> str:
        """Return the commands that will run, one for each host."""
        return "\n".join(shlex.join(self.make_command(host, {}, {})) for host in self.slots)

    def make_command(self, host: str, local: Mapping[str, int], remote: Mapping[str, int]) -> list[str]:
        """Return the command for one host, which forwards `remote` ports of the host to `local` ones."""
        options = {
            "BatchMode": "yes",  # a question would wait forever
            "ExitOnForwardFailure": "yes",
            "ConnectTimeout": round(timeouts.SSH_CONNECT_TIMEOUT_S),
            "ServerAliveInterval": round(timeouts.SSH_ALIVE_INTERVAL_S),
            "ServerAliveCountMax": _MAX_SILENT_CHECKS,  # together as long as the controller waits for heartbeats
            "ControlPath": "none",  # the forwarded ports end with this process
            "LogLevel": "INFO",  # with less, ssh ends without a reason when its server is silent
        }
        command = ["ssh", "-T", *map(os.path.expanduser, self.ssh_options)]
        command += [f"-o{name}={value}" for name, value in options.items()]
        for name, port in local.items():
            command += ["-R", f"{_LOOPBACK}:{remote[name]}:{_LOOPBACK}:{port}"]
        return [*command, "--", host, f"exec {self.python} -m {AGENT_MODULE}"]


class SSHConnection(AgentJob):
    """One host's connection."""

    def __init__(
        self, host: str, process: ProcessId, log: Path, connect: Callable[[], subprocess.Popen[bytes]] | None = None
    ) -> None:
        self.host, self._process, self._log, self._connect_again = host, process, log, connect
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, launcher: SSH, request: AgentRequest, host: str) -> SSHConnection:
        """Connect to a host, and run the agent there."""
        log = request.folder / "log" / f"agent-{host.replace('/', '_')}.log"
        log.parent.mkdir(mode=0o700, exist_ok=True)

        def connect() -> subprocess.Popen[bytes]:
            return _start_ssh(launcher, request, host, log)

        child = connect()
        self = cls(host, ProcessId.from_pid(child.pid), log, connect)
        self._child = child
        return self

    @property
    def has_ended(self) -> bool:
        """Whether the process of ssh has ended."""
        return self._child.poll() is not None if self._child is not None else not self._process.is_alive

    def get_state(self) -> JobState:
        """Return whether the connection is up, and the reason if it isn't."""
        if not self.has_ended:
            return JobState("running", f"{self.host}: connected by SSH, process {self._process.pid}")
        text = self._log.read_text(errors="replace")[-_MAX_LOG_BYTES:] if self._log.exists() else ""
        if PORT_TAKEN in text and self._connect_again is not None:  # that may happen; other ports are free
            self._child, self._connect_again = self._connect_again(), None
            self._process = ProcessId.from_pid(self._child.pid)
            return JobState("running", f"{self.host}: connecting again through other ports")
        return JobState("ended", explain_failure(self.host, text))

    def cancel(self) -> None:
        """End the connection, and by that the agent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := self._process.find()) is not None:
                process.kill()
        if self._child is not None:
            self._child.wait(timeouts.KILL_TIMEOUT_S)

    def list_pids(self) -> list[int]:
        """Return the process of ssh."""
        return [self._process.pid] if self._process.is_alive else []

    def to_json(self) -> dict[str, Any]:
        """Return the process and the log."""
        return {"host": self.host, "process": dataclasses.asdict(self._process), "log": str(self._log)}


def _start_ssh(launcher: SSH, request: AgentRequest, host: str, log: Path) -> subprocess.Popen[bytes]:
    local = list_ports(request.connection)
    # The controller's ports may be in use on the host, and surely are if it is this machine.
    remote = dict(zip(local, random.sample(range(_FIRST_PORT, _LAST_PORT), len(local)), strict=True))
    connection = replace_ports(request.connection, remote)
    with log.open("wb") as output:
        child = subprocess.Popen(
            launcher.make_command(host, local, remote),
            env={**os.environ, MARKER_VARIABLE: str(request.folder)},  # the reaper finds the process by this variable
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # an interrupt in a terminal is for the notebook
        )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
        stdin.write(request.format_input(host, connection).encode())
    return child


def list_ports(connection: Mapping[str, Any]) -> dict[str, int]:
    """Return the ports of ipyparallel's connection information by name; a pair of them has two names."""
    ports: dict[str, int] = {}
    for name, value in connection.items():
        values = value if isinstance(value, list) else [value]
        if name not in ("key", "location") and values and all(type(item) is int for item in values):
            ports |= {f"{name}.{k}": port for k, port in enumerate(values)}
    return ports


def replace_ports(connection: Mapping[str, Any], ports: Mapping[str, int]) -> dict[str, Any]:
    """Return connection information with other ports, named as by `list_ports`."""
    changed = dict(connection)
    for name, value in connection.items():
        if f"{name}.0" in ports:
            many = [ports[f"{name}.{k}"] for k in range(len(value))] if isinstance(value, list) else None
            changed[name] = ports[f"{name}.0"] if many is None else many
    return changed


def explain_failure(host: str, output: str) -> str:
    """Return one sentence with a remedy for an error that ssh or the remote shell has printed."""
    # A nanny's lines come after the agent's end, and never have its cause.
    lines = [line.strip() for line in output.splitlines() if line.strip() and _NANNY not in line]
    last = lines[-1] if lines else "it printed nothing"
    if refusal := next((line.partition(REFUSAL)[2] for line in lines if REFUSAL in line), None):
        return f"{host}: {refusal}"
    if (remedy := find_remedy(lines, host)) is not None:
        return f"{host}: {remedy}"
    return f"{host}: the agent ended: {last}. Try `ssh {host}` in a terminal, and run the same python there"


def _parse_host(text: str) -> tuple[str, int]:
    """Return (host, engines) of "gpu1:4" or of a line of a host file."""
    if not isinstance(text, str):
        raise TypeError(f"SSH([{text!r}]): a host is a string, such as 'gpu1:4'")
    words = text.replace(" slots=", ":").split()
    host, _, count = words[0].rpartition(":") if words and ":" in words[0] else (*words[:1], "", "1")
    if len(words) != 1 or not host or host.startswith("-") or not count.isdecimal() or not int(count):
        raise ValueError(f"SSH([{text!r}]): give a host and its number of engines, as in 'gpu1:4'")
    return host, int(count)


def _read_host_file(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(
            f"SSH({path!r}): {error.strerror}. Give a list of hosts, as in SSH(['gpu1:4']), or a file with one a line"
        ) from None
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]

"""One host: its processes and its cable."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

COMMAND_S = 60.0
"""Limit for a command on a host."""
Service = Callable[["Host"], "subprocess.Popen[Any]"]
"""Starts one process on a host."""
_CLOCK_LEAD_S = 1000
"""Seconds that each host's monotonic clock leads the previous one's: machines start at different times."""
_NEW_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
_INIT = Path(__file__).with_name("init.py")


class Host:
    """A host that can lose its power or its cable."""

    def __init__(self, name: str, address: str, address6: str, bridge: str, cable: str, hosts_file: Path) -> None:
        self.name, self.address, self.address6, self.interface = name, address, address6, bridge
        self._clock_lead_s = _CLOCK_LEAD_S * int(address.rpartition(".")[2])
        self._services: list[Service] = []
        self._cable, self._hosts_file = cable, hosts_file
        self._unshare: subprocess.Popen[str] | None = None
        self._init: psutil.Process | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"Host({self.name!r}, {self.address!r})"

    # -- power ------------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether the host runs."""
        return self._init is not None and self._init.is_running()

    def power_on(self) -> None:
        """Start the host, connect its cable and start its services."""
        command = [
            *("setpriv", "--pdeathsig=KILL"),  # a killed test run takes its hosts along
            *(
                "unshare",
                *_NEW_NAMESPACES,
                "--time",
                f"--monotonic={self._clock_lead_s}",
                "--mount-proc",
                "--fork",
                "--kill-child",
            ),
            *(sys.executable, "-S", "-E", str(_INIT), self.name, str(self._hosts_file)),
        ]
        self._unshare = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal to the tests' process group would end it
        )
        assert self._unshare.stdout is not None
        ready = self._unshare.stdout.readline()
        if ready != "ready\n":
            raise RuntimeError(f"{self.name} did not start: {ready!r}, exit code {self._unshare.wait(COMMAND_S)}")
        (self._init,) = psutil.Process(self._unshare.pid).children()
        self._connect_cable()
        for service in self._services:
            self._started.append(service(self))

    def add_service(self, service: Service) -> None:
        """Start a service now, and again whenever the host starts."""
        self._services.append(service)
        self._started.append(service(self))

    def power_off(self) -> None:
        """End the host at once. Nobody gets a FIN or a RST from it: the cable is cut before."""
        if self._unshare is None:
            return
        if self.is_on:
            self.cut()
        self._unshare.kill()  # its child ends with it, and with that one all processes of the host
        self._unshare.wait(COMMAND_S)
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            assert self._init is not None
            self._init.wait(COMMAND_S)
        for process in self._started:
            process.wait(COMMAND_S)
        self._unshare, self._init, self._started = None, None, []
        # The kernel deletes the cable with the host, unless sockets with unsent data keep the network for minutes.
        subprocess.run(["ip", "link", "delete", self._cable], capture_output=True, check=False, timeout=COMMAND_S)

    # -- cable ------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Cut the cable. Nothing is told to either end."""
        run("ip", "link", "set", self._cable, "down")

    def restore(self) -> None:
        """Connect the cable again, at full speed."""
        run("ip", "link", "set", self._cable, "up")
        for prefix in ((), self._enter()):
            device = self.interface if prefix else self._cable
            command = [*prefix, "tc", "qdisc", "delete", "dev", device, "root"]
            subprocess.run(command, capture_output=True, check=False, timeout=COMMAND_S)

    def slow_down(self, delay_ms: int) -> None:
        """Delay all that is sent to the host."""
        run("tc", "qdisc", "replace", "dev", self._cable, "root", "netem", "delay", f"{delay_ms}ms")

    def throttle(self, mbit_per_s: int) -> None:
        """Limit the speed of all that is sent to the host, and of all that it sends."""
        limits = ("root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", "32kb", "latency", "400ms")
        run("tc", "qdisc", "replace", "dev", self._cable, *limits)
        self.run("tc", "qdisc", "replace", "dev", self.interface, *limits)

    def _connect_cable(self) -> None:
        pid = str(self._get_init().pid)
        run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", self.interface, "netns", pid)
        run("ip", "link", "set", self._cable, "master", self.interface, "up")
        inside = ("nsenter", f"--target={pid}", "--net", "ip")
        run(*inside, "link", "set", "lo", "up")
        number = int(self.address.rpartition(".")[2])
        # A host keeps its hardware address, or others would send to the former one for a while.
        run(*inside, "link", "set", self.interface, "address", f"02:00:00:00:00:{number:02x}")
        add_address(f"{self.address}/24", self.interface, *inside[:-1])
        add_address(f"{self.address6}/64", self.interface, *inside[:-1])
        run(*inside, "link", "set", self.interface, "up")

    def use_only_ipv6(self) -> None:
        """Remove the IPv4 address, until the host is started again."""
        self.run("ip", "address", "delete", f"{self.address}/24", "dev", self.interface)

    def use_ipv4_too(self) -> None:
        """Add the IPv4 address again."""
        add_address(f"{self.address}/24", self.interface, *self._enter())

    # -- processes --------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, timeout: float = COMMAND_S) -> str:
        """Run a command on the host, and return what it prints."""
        done = subprocess.run([*self._enter(), *command], capture_output=True, text=True, check=False, timeout=timeout)
        if check and done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.returncode}, {done.stdout}{done.stderr}")
        return done.stdout

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the host; it ends with the host at the latest."""
        return subprocess.Popen([*self._enter(), *command], stdin=subprocess.DEVNULL, start_new_session=True, **options)

    def list_processes(self) -> list[psutil.Process]:
        """Return the processes on the host, without its first one; pids are those of this machine."""
        if not self.is_on:
            return []
        return self._get_init().children(recursive=True) + self._find_entered()

    def list_listening(self) -> list[tuple[str, str]]:
        """Return (program, address) of each socket that listens on the host, UDP included."""
        lines = [line.split() for line in self.run("ss", "-Hlntup").splitlines()]
        return [(words[-1].split('"')[1], words[4].rpartition(":")[0].strip("[]")) for words in lines]

    def count_bytes(self) -> int:
        """Return the bytes that have crossed the host's cable, in both directions."""
        folder = Path("/sys/class/net", self._cable, "statistics")
        return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

    def _find_entered(self) -> list[psutil.Process]:
        """Return processes that entered the host: their parents may be outside."""
        space = Path(f"/proc/{self._get_init().pid}/ns/pid").readlink()
        found, children = [], set(self._get_init().children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == space and process != self._init:
                    found.append(process)
        return [process for process in found if process not in children]

    def _enter(self) -> tuple[str, ...]:
        flags = ("--net", "--uts", "--mount", "--ipc", "--time", "--pid")
        return ("nsenter", f"--target={self._get_init().pid}", *flags, "--")

    def _get_init(self) -> psutil.Process:
        assert self._init is not None, f"{self.name} is off"
        return self._init


def add_address(address: str, interface: str, *prefix: str) -> None:
    """Give an interface an address with the length of its network. `prefix` is a command that enters a host."""
    checks = ["nodad"] if ":" in address else []  # an address that waits for its check can't be used
    run(*prefix, "ip", "address", "add", address, "dev", interface, *checks)


def run(*command: str) -> str:
    """Run a command on this machine, and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}, {done.stdout}{done.stderr}")
    return done.stdout

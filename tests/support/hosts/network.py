"""Hosts on one bridge, and what they share."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts.host import Host, add_address, run

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS = ("ip", "mount", "nsenter", "setpriv", "unshare")


class Network:
    """Hosts, and the bridge that connects them with this machine."""

    def __init__(self, bridge: str, subnet: str, subnet6: str, folder: Path, num_hosts: int) -> None:
        self.interface = bridge
        """Name of the network interface, the same on this machine and on each host."""
        self.address = f"{subnet}.254"
        """Address of this machine on the bridge."""
        self.address6 = f"{subnet6}::fe"
        self.folder = folder
        """Folder that all hosts see."""
        hosts_file = folder / "etc-hosts"
        self.hosts = [
            Host(f"host{k}", f"{subnet}.{k}", f"{subnet6}::{k}", bridge, f"{bridge}h{k}", hosts_file)
            for k in range(1, num_hosts + 1)
        ]
        names = [("127.0.0.1", "localhost"), (self.address, socket.gethostname())]
        names += [(host.address, host.name) for host in self.hosts]
        hosts_file.write_text("".join(f"{address} {name}\n" for address, name in names))

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def repair(self) -> None:
        """Connect all cables, and start hosts that are off."""
        for host in self.hosts:
            if host.is_on:
                host.restore()
            else:
                host.power_off()  # collects what is left of it
                host.power_on()


def require(*programs: str) -> None:
    """Skip the test if it lacks a program, root, or a Python that hosts see."""
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: `make hosts` installs it on Debian")
    if os.getuid() != 0:
        pytest.skip("hosts in namespaces need root")
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("hosts would not see this Python, which is in /tmp")


@contextlib.contextmanager
def make_network(num_hosts: int) -> Iterator[Network]:
    """Start hosts, and end them with all their processes."""
    require(*PROGRAMS)
    pid = os.getpid()
    bridge, subnet, subnet6 = f"dtk{pid}", f"10.{150 + pid % 50}.{pid // 50 % 250}", f"fd64:{pid % 0x10000:x}"
    with (
        tempfile.TemporaryDirectory(prefix=".dtkit-hosts-", dir=Path.home()) as folder,
        _make_bridge(bridge, f"{subnet}.254/24", f"{subnet6}::fe/64"),
    ):
        network = Network(bridge, subnet, subnet6, Path(folder), num_hosts)
        try:
            for host in network.hosts:
                host.power_on()
            yield network
        finally:
            for host in network.hosts:
                host.power_off()


@contextlib.contextmanager
def _make_bridge(bridge: str, *addresses: str) -> Iterator[None]:
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
    except RuntimeError as error:
        pytest.skip(f"this system refuses a network bridge: {error}")
    try:
        for address in addresses:
            add_address(address, bridge)
        run("ip", "link", "set", bridge, "up")
        yield
    finally:
        run("ip", "link", "delete", bridge)

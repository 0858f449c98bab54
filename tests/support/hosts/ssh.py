"""An SSH server on each host, with keys and a client's configuration of this network alone."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

from tests.support.hosts.host import run
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.hosts.host import Host
    from tests.support.hosts.network import Network

PROGRAMS = ("ssh", "ssh-keygen", "sshd")


def start_ssh(network: Network) -> Path:
    """Start a server on each host, and return the client's configuration, which knows the hosts by name."""
    folder = network.folder / "ssh"
    folder.mkdir(mode=0o700)
    for key in ("client_key", "host_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    (folder / "sshd_config").write_text(_format_server_config(folder))
    (folder / "config").write_text(_format_client_config(network, folder))
    public_key = (folder / "host_key.pub").read_text()
    known = [f"{host.name},{host.address},{host.address6} {public_key}" for host in network.hosts]
    (folder / "known_hosts").write_text("".join(known))

    def start_server(host: Host) -> subprocess.Popen[Any]:
        with (folder / f"{host.name}.log").open("a") as log:
            return host.start("/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config"), stderr=log)

    for host in network.hosts:
        host.add_service(start_server)
    for host in network.hosts:
        wait_until_ready(folder / "config", host)
    return folder / "config"


def wait_until_ready(config: Path, host: Host) -> None:
    """Wait until one can log in to the host."""
    login = ["ssh", "-F", str(config), host.name, "true"]
    wait_until(lambda: not subprocess.run(login, capture_output=True, check=False, timeout=20).returncode, 20)


def _format_server_config(folder: Path) -> str:
    return f"""\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
MaxStartups 100
SetEnv PYTHONPATH="{os.environ.get("PYTHONPATH", "")}"
"""


def _format_client_config(network: Network, folder: Path) -> str:
    addresses = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in network.hosts)
    addresses += "".join(f"Host {host.name}-by-ipv6\n  HostName {host.address6}\n" for host in network.hosts)
    return f"""\
{addresses}Host *
  User root
  IdentityFile {folder}/client_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
  LogLevel ERROR
"""

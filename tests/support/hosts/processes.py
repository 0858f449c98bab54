"""What runs on hosts apart from their services."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.hosts.host import Host
    from tests.support.hosts.network import Network

_SERVICES = ("sshd", "slurmd")


def list_commands(network: Network, hosts: Sequence[Host] | None = None) -> list[str]:
    """Return the command lines on all hosts, or on these, without those of their services."""
    lines = []
    for process in (process for host in hosts or network.hosts for process in host.list_processes()):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    return [line for line in lines if line and not any(name in line for name in _SERVICES)]

"""Remedies for errors that ssh, a remote shell or Python print when an agent can't start."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PORT_TAKEN = "remote port forwarding failed"
_ALLOW_FORWARDING = "Its SSH server must allow forwarding (AllowTcpForwarding)"
_OUT_OF_REACH = "The host is off or out of reach; leave it out, or give a jump host in ~/.ssh/config"
_REMEDIES = {
    "could not resolve hostname": "Correct the name, or give the host an entry in ~/.ssh/config",
    "host key verification failed": "Accept the key once with `ssh {host}` in a terminal",
    r"permission denied( \(|, )": "Let `ssh {host}` work without a password: add your key with ssh-copy-id, or "
    "name a key in ~/.ssh/config or with ssh_options=['-i', path]",
    "connection refused": "Start an SSH server there, or name its port in ~/.ssh/config",
    "connection timed out": _OUT_OF_REACH,
    "no route to host": _OUT_OF_REACH,
    "not responding": "The connection was cut",
    PORT_TAKEN: _ALLOW_FORWARDING,
    "administratively prohibited": _ALLOW_FORWARDING,
    "no module named": "Install dtkit-jupyter in that Python, or name another one with python=",
    r"python\S*: (command not found|not found|no such file)": "Name the Python of the hosts, as in "
    "python='~/env/bin/python'",
    r"(not found|no such file or directory|permission denied)$": "That can't be run on the host; correct python=, or "
    "setup= if there is one",
    "no space left": "Free space in the temporary folder of that host",
    "registration timed out": "That host or this machine may be overloaded; try again, or with a longer timeout=",
}
"""Remedies by a pattern of the line that is printed, in lower case."""


def find_remedy(lines: Iterable[str], host: str) -> str | None:
    """Return the line with the cause and its remedy, or None if no line is known. `host` may be its name, or words."""
    lines = [line.strip() for line in lines]
    for pattern, remedy in _REMEDIES.items():
        if line := next((line for line in lines if re.search(pattern, line.lower())), None):
            return f"{line.rstrip('.')}. {remedy.format(host=host)}"
    return None

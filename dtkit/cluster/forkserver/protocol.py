"""What a notebook and the fork server of a cluster send each other: one line of JSON each way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit._util import unix_socket

if TYPE_CHECKING:
    import socket
    from pathlib import Path

_SOCKET_FILE = "fork.sock"


@dataclasses.dataclass(frozen=True)
class ForkRequest:
    """Request for new engines; for none, it asks who runs the server."""

    engines: int


@dataclasses.dataclass(frozen=True)
class ForkReply:
    """Pids of the server and of the engines that it has just forked."""

    server: int
    engines: list[int]


def listen(folder: Path) -> socket.socket:
    """Return a new listening socket in a cluster's private folder, in place of an earlier one."""
    return unix_socket.listen(folder / _SOCKET_FILE)


def connect(folder: Path, timeout: float) -> socket.socket:
    """Return a connection to the server of a cluster. Raise OSError if it has ended."""
    return unix_socket.connect(folder / _SOCKET_FILE, timeout)

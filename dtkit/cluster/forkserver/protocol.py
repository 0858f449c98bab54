"""What a notebook and the fork server of a cluster send each other: one line of JSON each way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    (folder / _SOCKET_FILE).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)  # port: none, a file
    with _open_path(folder) as path:
        listener.bind(path)
    listener.listen()
    return listener


def connect(folder: Path, timeout: float) -> socket.socket:
    """Return a connection to the server of a cluster. Raise OSError if it has ended."""
    connection = socket.socket(socket.AF_UNIX)  # port: none, a file
    connection.settimeout(timeout)
    try:
        with _open_path(folder) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _open_path(folder: Path) -> Iterator[str]:
    """Return the path of the socket through a descriptor of its folder: such paths have 108 bytes at most."""
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET_FILE}"
    finally:
        os.close(descriptor)

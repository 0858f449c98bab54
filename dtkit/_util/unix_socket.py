"""Sockets that are files: only users who may enter their folder can connect. Linux only."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def listen(path: Path) -> socket.socket:
    """Return a new listening socket, in place of an earlier one."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)  # port: none, a file
    with _open_folder(path.parent) as folder:
        listener.bind(f"{folder}/{path.name}")
    listener.listen()
    return listener


def connect(path: Path, timeout: float) -> socket.socket:
    """Return a connection to the process that listens there. Raise OSError if it has ended."""
    connection = socket.socket(socket.AF_UNIX)  # port: none, a file
    connection.settimeout(timeout)
    try:
        with _open_folder(path.parent) as folder:
            connection.connect(f"{folder}/{path.name}")
    except BaseException:
        connection.close()
        raise
    return connection


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Let each send and receive wait that long at most, then raise BlockingIOError. The socket stays blocking.

    Python's own timeout polls the socket before each call.
    """
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[str]:
    """Yield a short path of the folder, through a descriptor: paths of sockets have 108 bytes at most."""
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)

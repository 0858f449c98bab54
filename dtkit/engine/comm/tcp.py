"""TCP sockets of this process: identifying gloo's, counting their sent bytes, and shutting them down.

An inode identifies a socket, since the number of a closed descriptor is reused. All operations use duplicates of
descriptors. Python closes the descriptor of an unreferenced socket object, and an interrupt may come between any two
instructions. A socket object with gloo's or ZeroMQ's own descriptor would then close theirs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.health.link_traffic import LinkTraffic

if TYPE_CHECKING:
    from collections.abc import Callable


# Offsets in struct tcp_info of linux/tcp.h: tcpi_bytes_acked, tcpi_notsent_bytes, tcpi_delivery_rate, which is followed
# by tcpi_busy_time and tcpi_rwnd_limited in microseconds (Linux 4.9 and later), and tcpi_bytes_sent, followed by
# tcpi_bytes_retrans (4.19 and later). The first byte is the state.
_TCP_INFO, _BYTES_ACKED_OFFSET, _NOTSENT_OFFSET, _DELIVERY_RATE_OFFSET, _BYTES_SENT_OFFSET = 11, 120, 144, 160, 200
_TCP_INFO_SIZE = _BYTES_SENT_OFFSET + 16
_TCP_ESTABLISHED = b"\x01"
_MAX_LINKS = 16  # per rank, in its status


def list_sockets() -> set[int]:
    """Return the inodes of the current TCP sockets."""
    return set(_find_tcp_sockets())


def list_listening_ports(known_sockets: set[int]) -> list[int]:
    """Return the ports on which sockets listen that aren't among the known ones."""
    return [
        port for fd in _find_new_sockets(known_sockets).values() if _is_listening(fd) and (port := _get_ports(fd)[0])
    ]


def make_connection_breaker() -> Callable[[], None]:
    """Return a function that shuts down all TCP connections that this process opens from now on.

    This is for process groups that a user's script forms, since their ports are unknown.
    """
    before = list_sockets()

    def shut_down_new() -> None:
        _shut_down_sockets(
            {inode: (_duplicate(fd), fd) for inode, fd in _find_new_sockets(before).items() if not _is_listening(fd)}
        )

    return shut_down_new


class GroupConnections:
    """Connections of a process group: duplicates of gloo's descriptors, which stay open when gloo closes its own."""

    def __init__(self) -> None:
        self._sockets_by_inode: dict[int, tuple[socket.socket, int]] = {}  # (duplicate, gloo's descriptor)
        # locks: while a group's sockets are shut, for a quarter of a second at most
        self._lock = threading.Lock()  # descriptors closed in a shutdown could be reused

    def add(self, known_sockets: set[int], ports: set[int]) -> None:
        """Add the connections to or from one of these ports whose sockets aren't among the known ones."""
        connections = {
            inode: fd
            for inode, fd in _find_new_sockets(known_sockets).items()
            if not _is_listening(fd) and ports & set(_get_ports(fd))
        }
        self._sockets_by_inode.update({inode: (_duplicate(fd), fd) for inode, fd in connections.items()})

    def count_sent_bytes(self) -> int | None:
        """Return the number of sent bytes, each counted once, or None if the system doesn't count (Linux does)."""
        total = 0
        for connection, _ in self._sockets_by_inode.values():
            info = _read_tcp_info(connection)
            if len(info) < _TCP_INFO_SIZE:
                return None
            sent, retransmitted = struct.unpack_from("=QQ", info, _BYTES_SENT_OFFSET)
            (buffered,) = struct.unpack_from("=I", info, _NOTSENT_OFFSET)
            total += sent - retransmitted + buffered
        return total

    def list_links(self) -> list[LinkTraffic]:
        """Return the traffic of the connections to other hosts: those with the most bytes. Any thread may call it."""
        links = []
        for connection, _ in list(self._sockets_by_inode.values()):
            with contextlib.suppress(OSError):  # closed meanwhile
                local, remote = connection.getsockname()[:2], connection.getpeername()[:2]
                info = _read_tcp_info(connection) if local[0] != remote[0] else b""
                if len(info) == _TCP_INFO_SIZE:
                    (acked_bytes,) = struct.unpack_from("=Q", info, _BYTES_ACKED_OFFSET)
                    rate, busy_us, receiver_us = struct.unpack_from("=QQQ", info, _DELIVERY_RATE_OFFSET)
                    busy_s = (busy_us - receiver_us) / 1e6
                    links.append(LinkTraffic(local, remote, acked_bytes, busy_s, float(rate)))
        return sorted(links, key=lambda link: -link.acked_bytes)[:_MAX_LINKS]

    def has_closed(self) -> bool:
        """Return whether one of them has been closed, at either end; False if the system doesn't report it."""
        states = [_read_tcp_info(connection)[:1] for connection, _ in list(self._sockets_by_inode.values())]
        return any(state not in (b"", _TCP_ESTABLISHED) for state in states)

    def shut_down(self) -> None:
        """End all waits for these connections, at both ends. Any thread may call it."""
        with self._lock:
            _shut_down_sockets(self._sockets_by_inode)

    def close(self) -> None:
        """Close the duplicates."""
        with self._lock:
            while self._sockets_by_inode:
                self._sockets_by_inode.popitem()[1][0].close()


def _shut_down_sockets(sockets_by_inode: dict[int, tuple[socket.socket, int]]) -> None:
    """Shut down the reading side of all sockets, and later the writing side.

    When gloo reads the end of a connection, it ends all waits, and writes no more. But if a write fails, gloo never
    ends the wait of a queued message (pair.cc, `write` and `signalException`). So the writing side ends last. Other
    ranks that were interrupted with this one need the pause in between.
    """
    for connection, _ in sockets_by_inode.values():
        _shut_down_socket(connection, socket.SHUT_RD)
    deadline, pause = time.monotonic() + timeouts.SHUTDOWN_NOTICE_TIMEOUT_S, threading.Event()
    while time.monotonic() < deadline and any(_get_inode(fd) == inode for inode, (_, fd) in sockets_by_inode.items()):
        pause.wait(timeouts.SHUTDOWN_NOTICE_POLL_S)
    pause.wait(timeouts.PEER_INTERRUPT_S)
    for connection, _ in sockets_by_inode.values():
        _shut_down_socket(connection, socket.SHUT_RDWR)


def _find_tcp_sockets() -> dict[int, int]:
    """Return the descriptors of TCP sockets by inode: the lowest one of each."""
    descriptors: dict[int, int] = {}
    for fd in sorted(map(int, os.listdir("/dev/fd"))):  # noqa: PTH208 - names of descriptors, not files
        with contextlib.suppress(OSError), _duplicate(fd) as sock:
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                descriptors.setdefault(os.fstat(fd).st_ino, fd)
    return descriptors


def _find_new_sockets(known_sockets: set[int]) -> dict[int, int]:
    return {inode: fd for inode, fd in _find_tcp_sockets().items() if inode not in known_sockets}


def _duplicate(fd: int) -> socket.socket:
    """Return a socket object with a duplicate of a descriptor. Raises OSError if the descriptor isn't a socket."""
    duplicate = os.dup(fd)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _read_tcp_info(sock: socket.socket) -> bytes:
    """Return a connection's struct tcp_info (linux/tcp.h), or no bytes on other systems."""
    return sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_SIZE) if sys.platform == "linux" else b""


def _is_listening(fd: int) -> bool:
    """Return whether a socket listens, in which case gloo would abort if it were shut down. False if it was closed."""
    with contextlib.suppress(OSError), _duplicate(fd) as sock:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _get_ports(fd: int) -> list[int]:
    """Return the local port, and the remote one if the socket is connected."""
    ports: list[int] = []
    with contextlib.suppress(OSError), _duplicate(fd) as sock:
        ports.append(int(sock.getsockname()[1]))
        ports.append(int(sock.getpeername()[1]))
    return ports


def _get_inode(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino
    return None


def _shut_down_socket(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)

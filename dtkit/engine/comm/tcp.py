"""The TCP sockets of this process: which are gloo's, what they have sent, and how they are shut down.

A socket is known by its inode, since the number of a descriptor is another's as soon as it is closed. What is done to
one is done to a duplicate. Python closes the descriptor of a socket object that nobody holds any more, and an interrupt
may come between any two of its instructions: with one made on gloo's or ZeroMQ's own descriptor it closed theirs.
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

if TYPE_CHECKING:
    from collections.abc import Callable

_SHUTDOWN_NOTICE_S = 0.2  # for gloo, to see that a connection has ended
_PEER_INTERRUPT_S = 0.02  # for other ranks that were interrupted too, to do the same
_POLL_S = 0.0005

# Where linux/tcp.h has, in struct tcp_info, tcpi_notsent_bytes (4.6 and later), tcpi_bytes_sent and, behind it,
# tcpi_bytes_retrans (4.19 and later). At its beginning is the state.
_TCP_INFO, _NOTSENT_OFFSET, _BYTES_SENT_OFFSET = 11, 144, 200
_TCP_INFO_SIZE = _BYTES_SENT_OFFSET + 16
_TCP_ESTABLISHED = b"\x01"


def list_sockets() -> set[int]:
    """The inodes of the TCP sockets that there are now."""
    return set(_find_tcp_sockets())


def list_listening_ports(known_sockets: set[int]) -> list[int]:
    """The ports that sockets newer than `before` listen on."""
    return [
        port for fd in _find_new_sockets(known_sockets).values() if _is_listening(fd) and (port := _get_ports(fd)[0])
    ]


def make_connection_breaker() -> Callable[[], None]:
    """A function that shuts down every TCP connection that this process opened after now.

    For groups that a user's script makes by itself, whose ports we don't know.
    """
    before = list_sockets()

    def shut_down_new() -> None:
        _shut_down_sockets(
            {inode: (_duplicate(fd), fd) for inode, fd in _find_new_sockets(before).items() if not _is_listening(fd)}
        )

    return shut_down_new


class GroupConnections:
    """A process group's own connections: duplicates of gloo's descriptors, which stay when gloo closes its own."""

    def __init__(self) -> None:
        self._sockets_by_inode: dict[int, tuple[socket.socket, int]] = {}  # by inode: (duplicate, gloo's descriptor)
        # locks: while a group's sockets are shut, for a quarter of a second at most
        self._lock = threading.Lock()  # nothing is closed while it is being shut down: its number would be another's

    def add(self, known_sockets: set[int], ports: set[int]) -> None:
        """Those of the sockets newer than `before` that connect to one of these ports."""
        found = {
            inode: fd
            for inode, fd in _find_new_sockets(known_sockets).items()
            if not _is_listening(fd) and ports & set(_get_ports(fd))
        }
        self._sockets_by_inode.update({inode: (_duplicate(fd), fd) for inode, fd in found.items()})

    def count_sent_bytes(self) -> int | None:
        """Bytes that they have sent, each once; None where the system does not say (Linux does)."""
        total = 0
        for own, _ in self._sockets_by_inode.values():
            info = _read_tcp_info(own)
            if len(info) < _TCP_INFO_SIZE:
                return None
            sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT_OFFSET)
            (waiting,) = struct.unpack_from(
                "=I", info, _NOTSENT_OFFSET
            )  # handed over, and still in the socket's buffer
            total += sent - again + waiting
        return total

    def has_closed(self) -> bool:
        """Whether one of them has been closed, at either end. Where the system does not say, none has."""
        states = [_read_tcp_info(own)[:1] for own, _ in list(self._sockets_by_inode.values())]
        return any(state not in (b"", _TCP_ESTABLISHED) for state in states)

    def shut_down(self) -> None:
        """Have whoever waits for one of them wait no more, here and at the other end. Any thread may call it."""
        with self._lock:
            _shut_down_sockets(self._sockets_by_inode)

    def close(self) -> None:
        """Let go of the duplicates."""
        with self._lock:
            while self._sockets_by_inode:
                self._sockets_by_inode.popitem()[1][0].close()


def _shut_down_sockets(sockets_by_inode: dict[int, tuple[socket.socket, int]]) -> None:
    """First have gloo here see them as ended, then the peers.

    gloo tells all that wait once it reads a connection's end, and refuses to write from then on. But a message that it
    found it could not write, and whose sender it holds in its queue, it never tells (pair.cc, `write` and
    `signalException`): who waits for that, waits until the time limit. So the writing side ends last, and after the
    moment that other ranks need that were interrupted with this one.
    """
    for own, _ in sockets_by_inode.values():
        _shut_down_socket(own, socket.SHUT_RD)
    deadline, pause = time.monotonic() + _SHUTDOWN_NOTICE_S, threading.Event()
    while time.monotonic() < deadline and any(_get_inode(fd) == inode for inode, (_, fd) in sockets_by_inode.items()):
        pause.wait(_POLL_S)
    pause.wait(_PEER_INTERRUPT_S)
    for own, _ in sockets_by_inode.values():
        _shut_down_socket(own, socket.SHUT_RDWR)


def _find_tcp_sockets() -> dict[int, int]:
    """Descriptors of TCP sockets by inode; of several, the first."""
    found: dict[int, int] = {}
    for fd in sorted(map(int, os.listdir("/dev/fd"))):  # noqa: PTH208 - names of descriptors, not files
        with contextlib.suppress(OSError), _duplicate(fd) as sock:
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(os.fstat(fd).st_ino, fd)
    return found


def _find_new_sockets(known_sockets: set[int]) -> dict[int, int]:
    return {inode: fd for inode, fd in _find_tcp_sockets().items() if inode not in known_sockets}


def _duplicate(fd: int) -> socket.socket:
    """The same socket under a descriptor of ours; OSError where it is none."""
    own = os.dup(fd)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _read_tcp_info(sock: socket.socket) -> bytes:
    """What the kernel knows of a connection (struct tcp_info of linux/tcp.h); nothing on other systems."""
    return sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_SIZE) if sys.platform == "linux" else b""


def _is_listening(fd: int) -> bool:
    """Whether it listens. (Shutting such a one aborts gloo.) One that was closed meanwhile does not."""
    with contextlib.suppress(OSError), _duplicate(fd) as sock:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _get_ports(fd: int) -> list[int]:
    """The port here, and the one at the other end where there is one."""
    found: list[int] = []
    with contextlib.suppress(OSError), _duplicate(fd) as sock:
        found.append(int(sock.getsockname()[1]))
        found.append(int(sock.getpeername()[1]))
    return found


def _get_inode(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino
    return None


def _shut_down_socket(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)

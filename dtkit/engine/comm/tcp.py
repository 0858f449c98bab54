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

_NOTICED_S = 0.2  # for gloo, to see that a connection has ended
_ALIKE_S = 0.02  # for other ranks that were interrupted too, to do the same
_LOOK_S = 0.0005

# Where linux/tcp.h has, in struct tcp_info, tcpi_notsent_bytes (4.6 and later), tcpi_bytes_sent and, behind it,
# tcpi_bytes_retrans (4.19 and later). At its beginning is the state.
_TCP_INFO, _NOT_SENT, _BYTES_SENT = 11, 144, 200
_TCP_INFO_SIZE = _BYTES_SENT + 16
_ESTABLISHED = b"\x01"


def present() -> set[int]:
    """The inodes of the TCP sockets that there are now."""
    return set(_sockets())


def listening(before: set[int]) -> list[int]:
    """The ports that sockets newer than `before` listen on."""
    return [port for fd in _new(before).values() if _listens(fd) and (port := _ports(fd)[0])]


def breaker() -> Callable[[], None]:
    """A function that shuts down every TCP connection that this process opened after now.

    For groups that a user's script makes by itself, whose ports we don't know.
    """
    before = present()

    def break_up() -> None:
        _shut_down({inode: (_duplicate(fd), fd) for inode, fd in _new(before).items() if not _listens(fd)})

    return break_up


class Connections:
    """A process group's own connections: duplicates of gloo's descriptors, which stay when gloo closes its own."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[socket.socket, int]] = {}  # by inode: (duplicate, gloo's descriptor)
        # locks: while a group's sockets are shut, for a quarter of a second at most
        self._lock = threading.Lock()  # nothing is closed while it is being shut down: its number would be another's

    def add(self, before: set[int], ports: set[int]) -> None:
        """Those of the sockets newer than `before` that connect to one of these ports."""
        found = {inode: fd for inode, fd in _new(before).items() if not _listens(fd) and ports & set(_ports(fd))}
        self._held.update({inode: (_duplicate(fd), fd) for inode, fd in found.items()})

    def sent(self) -> int | None:
        """Bytes that they have sent, each once; None where the system does not say (Linux does)."""
        total = 0
        for own, _ in self._held.values():
            info = _info(own)
            if len(info) < _TCP_INFO_SIZE:
                return None
            sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
            (waiting,) = struct.unpack_from("=I", info, _NOT_SENT)  # handed over, and still in the socket's buffer
            total += sent - again + waiting
        return total

    def ended(self) -> bool:
        """Whether one of them has been closed, at either end. Where the system does not say, none has."""
        states = [_info(own)[:1] for own, _ in list(self._held.values())]
        return any(state not in (b"", _ESTABLISHED) for state in states)

    def shut_down(self) -> None:
        """Have whoever waits for one of them wait no more, here and at the other end. Any thread may call it."""
        with self._lock:
            _shut_down(self._held)

    def close(self) -> None:
        """Let go of the duplicates."""
        with self._lock:
            while self._held:
                self._held.popitem()[1][0].close()


def _shut_down(held: dict[int, tuple[socket.socket, int]]) -> None:
    """First have gloo here see them as ended, then the peers.

    gloo tells all that wait once it reads a connection's end, and refuses to write from then on. But a message that it
    found it could not write, and whose sender it holds in its queue, it never tells (pair.cc, `write` and
    `signalException`): who waits for that, waits until the time limit. So the writing side ends last, and after the
    moment that other ranks need that were interrupted with this one.
    """
    for own, _ in held.values():
        _shut(own, socket.SHUT_RD)
    deadline, pause = time.monotonic() + _NOTICED_S, threading.Event()
    while time.monotonic() < deadline and any(_inode(fd) == inode for inode, (_, fd) in held.items()):
        pause.wait(_LOOK_S)
    pause.wait(_ALIKE_S)
    for own, _ in held.values():
        _shut(own, socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """Descriptors of TCP sockets by inode; of several, the first."""
    found: dict[int, int] = {}
    for fd in sorted(map(int, os.listdir("/dev/fd"))):  # noqa: PTH208 - names of descriptors, not files
        with contextlib.suppress(OSError), _duplicate(fd) as sock:
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(os.fstat(fd).st_ino, fd)
    return found


def _new(before: set[int]) -> dict[int, int]:
    return {inode: fd for inode, fd in _sockets().items() if inode not in before}


def _duplicate(fd: int) -> socket.socket:
    """The same socket under a descriptor of ours; OSError where it is none."""
    own = os.dup(fd)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _info(own: socket.socket) -> bytes:
    """What the kernel knows of a connection (struct tcp_info of linux/tcp.h); nothing on other systems."""
    return own.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_SIZE) if sys.platform == "linux" else b""


def _listens(fd: int) -> bool:
    """Whether it listens. (Shutting such a one aborts gloo.) One that was closed meanwhile does not."""
    with contextlib.suppress(OSError), _duplicate(fd) as sock:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _ports(fd: int) -> list[int]:
    """The port here, and the one at the other end where there is one."""
    found: list[int] = []
    with contextlib.suppress(OSError), _duplicate(fd) as sock:
        found.append(int(sock.getsockname()[1]))
        found.append(int(sock.getpeername()[1]))
    return found


def _inode(fd: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_ino
    return None


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)

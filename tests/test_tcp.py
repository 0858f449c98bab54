"""A process group's connections: found among this process's sockets, and shut down reading side first."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from dtkit.engine.comm import tcp
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@contextlib.contextmanager
def connected() -> Iterator[tuple[int, socket.socket, socket.socket]]:
    """Yield (port, connecting socket, accepted socket)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller, listener.accept()[0] as called:
            yield port, caller, called


def test_group_connections_are_new_sockets_with_the_given_ports():
    with connected() as (old, _, _):
        before = tcp.list_sockets()
        with connected() as (port, caller, _), connected():
            assert port in tcp.list_listening_ports(before)
            assert old not in tcp.list_listening_ports(before)
            group = tcp.GroupConnections()
            group.add(before, {port, old})
            assert {os.fstat(own.fileno()).st_ino for own, _ in group._sockets_by_inode.values()} >= {
                os.fstat(caller.fileno()).st_ino
            }
            assert len(group._sockets_by_inode) == 2  # both ends lie in this process
            group.close()


def test_the_reading_side_is_shut_down_before_the_writing_side():
    before = tcp.list_sockets()
    with connected() as (port, caller, called):
        group = tcp.GroupConnections()
        group.add(before, {port})
        read: list[bytes] = []

        def reader() -> None:
            """As gloo does: closes its own end once it reads that the connection has ended."""
            read.append(caller.recv(1))
            called.sendall(b"x")  # still writable: the other end has not been notified
            caller.close()
            called.close()

        caller.settimeout(5)
        thread = threading.Thread(target=reader)
        thread.start()
        group.shut_down()
        thread.join(5)
        assert read == [b""]
        group.close()


def test_a_connection_closed_at_either_end_is_detected():
    for end in (0, 1):
        before = tcp.list_sockets()
        with connected() as (port, *ends):
            group = tcp.GroupConnections()
            group.add(before, {port})
            if sys.platform != "linux":
                pytest.skip("this system does not say")
            assert not group.has_closed()
            ends[end].shutdown(socket.SHUT_WR)
            ends[1 - end].settimeout(5)
            assert ends[1 - end].recv(1) == b""
            assert group.has_closed()
            group.close()
            assert not group.has_closed()


def test_sent_bytes_are_counted_if_the_system_supports_it():
    before = tcp.list_sockets()
    with connected() as (port, caller, called):
        group = tcp.GroupConnections()
        group.add(before, {port})
        if group.count_sent_bytes() is None:
            pytest.skip("this system does not count bytes by connection")
        caller.sendall(bytes(1000))
        called.recv(1000, socket.MSG_WAITALL)
        assert group.count_sent_bytes() == 1000
        group.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # duplicates that were never closed
def test_an_interrupt_at_any_line_closes_no_other_socket(monkeypatch: pytest.MonkeyPatch):
    """An engine is interrupted at each line while it inspects all of its sockets, including those of ZeroMQ."""
    with connected() as (port, caller, called):
        monkeypatch.setattr(tcp.os, "listdir", lambda _: [caller.fileno(), called.fileno()])
        for count in range(1000):
            group = tcp.GroupConnections()
            ended = interrupted_at(count, functools.partial(look, group, port))
            assert caller.getpeername() == called.getsockname()  # OSError where one was closed
            group.close()
            if ended:
                break
        assert ended
        assert count > 50


def look(group: tcp.GroupConnections, port: int) -> None:
    tcp.list_listening_ports(set())
    group.add(set(), {port})
    group.count_sent_bytes()


def interrupted_at(count: int, work: Callable[[], None]) -> bool:
    """Call `work`, with KeyboardInterrupt at the `count`-th line of the module that it runs; whether it ended first."""
    left = count

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != tcp.__file__:
            return None
        if event in ("line", "return"):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(previous)
    return True


def test_links_count_what_other_hosts_have_acknowledged():
    before = tcp.list_sockets()
    with contextlib.ExitStack() as stack:
        ends = []
        for source in ("127.0.0.1", "127.0.0.2"):  # the first connection stays on its host
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            caller = socket.create_connection(listener.getsockname(), source_address=(source, 0))
            ends.append((stack.enter_context(caller), stack.enter_context(listener.accept()[0])))
        group = tcp.GroupConnections()
        group.add(before, {caller.getsockname()[1] for caller, _ in ends})
        caller, called = ends[1]
        caller.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(called.recv(100_000))
        wait_until(lambda: group.list_links()[0].acked_bytes >= 100_000)
        sent, answered = group.list_links()
        assert (sent.local, sent.remote) == (caller.getsockname(), called.getsockname())
        assert (answered.local, answered.remote) == (sent.remote, sent.local)
        assert sent.rate > 0
        assert 0 <= sent.busy_s < 60
        group.close()
        assert group.list_links() == []

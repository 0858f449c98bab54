"""Collectives of the ranks of one host, by a socket between each two of them and by memory that all of them see.

gloo's all-reduce passes through several threads of each rank, and waits until the system schedules each of them. For
36 kB on two ranks this takes 0.3 to 4 ms. Through a socket, each rank waits once, and the sum takes 0.02 ms. So small
tensors go this way: a rank sends its numbers to all others, and adds theirs in the order of ranks. Larger ones go
through :mod:`dtkit.engine.comm.host_memory`. All ranks then have equal results, bit by bit.

The sockets are files in the cluster's folder, which other users can't enter.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dtkit._util import unix_socket
from dtkit._util.resources import find_loopback_interface
from dtkit.engine.comm.host_memory import HostMemory
from dtkit.engine.comm.host_messages import HostMessages
from dtkit.planning.cost_model import MAX_WHOLE_SUM_BYTES, compute_ring_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dtkit.messages import GroupSpec

_RANK = struct.Struct("q")


class HostLink:
    """Connections of this rank to all others of its process group, for one generation."""

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`connections` has one to each other rank."""
        self._rank, self._ranks = rank, sorted(connections)
        self._connections = [connections[other] for other in self._ranks]
        self._messages: HostMessages | None = None  # for pipelines
        for connection in self._connections:
            connection.setblocking(True)
        self.set_timeout(timeout_s)
        self._memory: HostMemory | None = None  # from the first large sum on
        self._unfinished: collections.deque[_Sum] = collections.deque()  # sums that this rank hasn't received
        self._message = memoryview(bytearray(1))
        self._collective_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to all others; by memory, those that they have read of it."""
        return self._collective_bytes + (0 if self._messages is None else self._messages.sent_bytes)

    @staticmethod
    def can_sum(tensor: torch.Tensor) -> bool:
        """Return whether a tensor can be summed this way: a plain one on the CPU."""
        return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_sparse or tensor.is_complex())

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place over all ranks. Raises RuntimeError if a rank has ended, or doesn't answer in time."""
        with self._end_on_error():
            self._finish_all()
            if tensor.nbytes <= MAX_WHOLE_SUM_BYTES:
                self._sum_by_sockets(tensor)
            else:
                self._sum_by_memory(tensor)

    def _sum_by_sockets(self, tensor: torch.Tensor) -> None:
        summed = _Sum(tensor, len(self._connections))
        self._send(summed.own)
        self._receive(summed)
        summed.finish(self._rank)

    def _sum_by_memory(self, tensor: torch.Tensor) -> None:
        self._open_memory().all_reduce(tensor.detach().view(-1))
        self._collective_bytes += round(compute_ring_bytes(tensor.nbytes, len(self._connections) + 1))

    def _open_memory(self) -> HostMemory:
        if self._memory is None:
            self._memory = HostMemory(self._rank, self._connections, self._meet)
        return self._memory

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """Gather the tensors of all ranks into a flat `output`. Raises RuntimeError as `all_reduce`."""
        with self._end_on_error():
            self._finish_all()
            self._open_memory().all_gather(output, own.view(-1))
        self._collective_bytes += own.nbytes * len(self._connections)

    def reduce_scatter(self, output: torch.Tensor, terms: torch.Tensor) -> None:
        """Sum over all ranks, of which each gets its part in a flat `output`. Raises RuntimeError as `all_reduce`."""
        with self._end_on_error():
            self._finish_all()
            self._open_memory().reduce_scatter(output, terms.view(-1))
        self._collective_bytes += output.nbytes * len(self._connections)

    def _meet(self) -> None:
        """Wait until all ranks have come here."""
        for connection in self._connections:
            connection.sendall(b"m")
        for connection in self._connections:
            _read(connection, self._message)

    def open_messages(self) -> HostMessages:
        """Return the messages between this rank and each other. A collective in its first call."""
        if self._messages is None:
            with self._end_on_error():
                self._finish_all()
                connections = dict(zip(self._ranks, self._connections, strict=True))
                self._messages = HostMessages(connections, self._timeout_s, self._end_on_error)
        return self._messages

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a tensor of at most `MAX_WHOLE_SUM_BYTES`, and return a function that waits for the sum, in place.

        All ranks start their sums in the same order.
        """
        summed = _Sum(tensor, len(self._connections))
        with self._end_on_error():
            self._send(summed.own)
            self._unfinished.append(summed)

        def wait_for_sum() -> torch.Tensor:
            if not summed.is_finished:
                with self._end_on_error():
                    self._finish_all()
            return tensor

        return wait_for_sum

    def _finish_all(self) -> None:
        while self._unfinished:
            self._receive(self._unfinished[0])
            self._unfinished.popleft().finish(self._rank)

    def _send(self, data: memoryview) -> None:
        self._collective_bytes += len(data) * len(self._connections)
        for connection in self._connections:
            connection.sendall(data)

    def _receive(self, summed: _Sum) -> None:
        for connection, received in zip(self._connections, summed.received, strict=True):
            _read(connection, received)

    @contextlib.contextmanager
    def _end_on_error(self) -> Iterator[None]:
        """End the connections after an error or an interrupt, because a message may be incomplete."""
        try:
            yield
        except BaseException as error:
            self.shut_down()
            if isinstance(error, OSError):
                raise self._make_error(error) from error
            raise

    def _make_error(self, error: OSError) -> RuntimeError:
        """Return the error of a collective that can't end, in the words of gloo."""
        if isinstance(error, BlockingIOError):
            return RuntimeError(f"timed out waiting {1000 * self._timeout_s:.0f}ms for another rank")
        return RuntimeError(f"Connection closed by another rank: {error}")

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of each message."""
        self._timeout_s = seconds
        for connection in self._connections:
            unix_socket.limit_waits(connection, seconds)
        if self._messages is not None:
            self._messages.set_timeout(seconds)

    def shut_down(self) -> None:
        """End all waits for these connections, at both ends. Any thread may call it."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._messages is not None:
            self._messages.shut_down()

    def close(self) -> None:
        """Close the connections, and give the shared memory back."""
        self._memory = None
        for connection in self._connections:
            connection.close()
        if self._messages is not None:
            self._messages.close()


class _Sum:
    """A tensor, and those of the other ranks."""

    def __init__(self, tensor: torch.Tensor, num_others: int) -> None:
        self._own = tensor.detach().view(-1)
        self._others = self._own.new_empty(num_others, len(self._own))
        self.own = _view_bytes(self._own)
        self.received = [_view_bytes(row) for row in self._others]
        """Memory for the bytes of each other rank."""
        self.is_finished = False

    def finish(self, rank: int) -> None:
        """Add all tensors in the order of ranks."""
        parts = list(self._others)
        parts.insert(rank, self._own.clone())
        torch.add(parts[0], parts[1], out=self._own)
        for part in parts[2:]:
            self._own.add_(part)
        self.is_finished = True


def _view_bytes(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _read(connection: socket.socket, data: memoryview) -> None:
    """Fill `data`. Raises OSError if the connection ends or the timeout is over."""
    while data:
        # waits: limited by the socket's timeout
        count = connection.recv_into(data, 0, socket.MSG_WAITALL)  # less after a signal
        if not count:
            raise ConnectionResetError("it has ended, or was interrupted")
        data = data[count:]


def has_other_hosts(spec: GroupSpec) -> bool:
    """Return whether ranks of a group are on other hosts, as far as its store and its interface show."""
    return spec.store is not None or spec.interface != find_loopback_interface()  # a process sees its host's alone


def connect(spec: GroupSpec, wait_for_ranks: Callable[[], None]) -> HostLink | None:
    """Connect to all other ranks. A collective; None for ranks of several hosts, and on systems other than Linux."""
    if has_other_hosts(spec) or spec.world_size == 1 or sys.platform != "linux":
        return None
    connections: dict[int, socket.socket] = {}
    path = _get_path(spec, spec.rank)
    try:
        with unix_socket.listen(path) as listener:
            wait_for_ranks()
            for rank in range(spec.rank):
                connections[rank] = unix_socket.connect(_get_path(spec, rank), spec.timeout_s)
                connections[rank].sendall(_RANK.pack(spec.rank))
            listener.settimeout(spec.timeout_s)
            while len(connections) < spec.world_size - 1:
                # waits: limited by the listener's timeout
                connection, _ = listener.accept()
                number = bytearray(_RANK.size)
                connection.settimeout(spec.timeout_s)
                _read(connection, memoryview(number))
                connections[_RANK.unpack(number)[0]] = connection
    finally:
        path.unlink(missing_ok=True)
    return HostLink(spec.rank, connections, spec.timeout_s)


def _get_path(spec: GroupSpec, rank: int) -> Path:
    return Path(f"{spec.store_path}.link-{rank}")

"""Messages between two ranks of one host, by memory that both see.

gloo sends a pipeline's activations through the kernel's loopback, by threads of both ranks. Here, the sender copies a
tensor into a buffer that it shares with the receiver, and sends the buffer's number through a socket. The receiver
copies the tensor out while it waits for it, and returns the buffer through the socket. No thread takes part.

Sending never waits: if all buffers are in use, there is another one. The sender may wait afterwards until the receiver
has read enough, because otherwise the first stage of an evaluation would be far ahead of the last one. A buffer has no
name, and ends with the last process that has it.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import socket
import struct
from typing import TYPE_CHECKING

import torch

from dtkit._util import unix_socket
from dtkit.engine.comm.host_memory import receive_descriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_MESSAGE_BYTES = 2**25
"""Size of the largest tensor that goes this way. A buffer doubles the memory of its tensor."""

MAX_UNREAD_MESSAGES, MAX_UNREAD_BYTES = 16, 2**26
"""Messages that a rank may leave unread before their sender waits."""

_HEADER = struct.Struct("qq")  # number of the buffer, and its size if the descriptor comes with it
_NO_SIZE = 0
_DESCRIPTOR = struct.Struct("i")
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(_DESCRIPTOR.size)
_MAX_RECORD_BYTES = 4096


class HostMessages:
    """Messages between this rank and all others of its host. Those of one sender arrive in order."""

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        timeout_s: float,
        end_on_error: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Connect to all other ranks. A collective.

        `connections` has one to each other rank. `end_on_error` is a context that turns an OSError into the error of a
        collective.
        """
        self._end_on_error = end_on_error
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}
        for rank, connection in connections.items():
            # port: a socket pair, whose other end goes to one rank
            own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                self._outboxes[rank] = _Outbox(own)
                socket.send_fds(connection, [b"m"], [other.fileno()])
        for rank, connection in connections.items():
            self._inboxes[rank] = _Inbox(socket.socket(fileno=receive_descriptor(connection)))
        self.set_timeout(timeout_s)
        self.sent_bytes = 0
        """Bytes of the tensors that this rank has sent."""

    @staticmethod
    def can_send(tensor: torch.Tensor) -> bool:
        """Return whether a tensor can be sent this way: a plain one on the CPU, and not too large."""
        return tensor.is_cpu and not tensor.is_sparse and tensor.nbytes <= MAX_MESSAGE_BYTES

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor to another rank. The caller may change it afterwards."""
        with self._end_on_error():
            self._outboxes[rank].send(tensor.detach())
        self.sent_bytes += tensor.nbytes

    def wait_for_room(self, rank: int) -> None:
        """Wait until the receiver has read enough of what was sent to it."""
        with self._end_on_error():
            self._outboxes[rank].wait_for_room()

    def start_receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Return a function that waits for a tensor of another rank, and copies it into `tensor`."""
        inbox = self._inboxes[rank]
        number = inbox.expect(tensor.data)  # without a new version, of which autograd would complain

        def wait_for_message() -> None:
            with self._end_on_error():
                inbox.receive_until(number)

        return wait_for_message

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of each message."""
        for connection in self._list_connections():
            unix_socket.limit_waits(connection, seconds)

    def shut_down(self) -> None:
        """End all waits for messages, at both ends. Any thread may call it."""
        for connection in self._list_connections():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections, and give the shared memory back."""
        for connection in self._list_connections():
            connection.close()
        self._outboxes.clear()
        self._inboxes.clear()

    def _list_connections(self) -> list[socket.socket]:
        boxes: list[_Outbox | _Inbox] = [*self._outboxes.values(), *self._inboxes.values()]
        return [box.connection for box in boxes]


class _Buffer:
    """Memory that two ranks share."""

    def __init__(self, descriptor: int, number: int, size: int) -> None:
        self.number, self.size = number, size
        self._memory = mmap.mmap(descriptor, size)

    def view_as(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the beginning of this memory as a tensor of the same type and shape."""
        data = torch.frombuffer(self._memory, dtype=torch.uint8, count=tensor.nbytes)
        return data.view(tensor.dtype).view(tensor.shape)


class _Outbox:
    """Messages to one rank. That rank answers each with the number of the buffer that it has read."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffers: list[_Buffer] = []
        self._free: list[_Buffer] = []
        self._unread_bytes = 0

    def send(self, tensor: torch.Tensor) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._collect_buffers(socket.MSG_DONTWAIT):
                pass
        fitting = [buffer for buffer in self._free if buffer.size >= tensor.nbytes]
        if not fitting:
            self._send_in_new_buffer(tensor)
            return
        buffer = min(fitting, key=lambda buffer: buffer.size)
        self._free.remove(buffer)
        self._unread_bytes += buffer.size
        if tensor.nbytes:
            buffer.view_as(tensor).copy_(tensor)
        self.connection.send(_HEADER.pack(buffer.number, _NO_SIZE))

    def _send_in_new_buffer(self, tensor: torch.Tensor) -> None:
        size = max(mmap.PAGESIZE, tensor.nbytes)
        descriptor = os.memfd_create("dtkit", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            buffer = _Buffer(descriptor, len(self._buffers), size)
            self._buffers.append(buffer)
            self._unread_bytes += size
            if tensor.nbytes:
                buffer.view_as(tensor).copy_(tensor)
            socket.send_fds(self.connection, [_HEADER.pack(buffer.number, size)], [descriptor])
        finally:
            os.close(descriptor)

    def wait_for_room(self) -> None:
        while len(self._buffers) - len(self._free) > MAX_UNREAD_MESSAGES or self._unread_bytes > MAX_UNREAD_BYTES:
            if not self._collect_buffers():
                raise ConnectionResetError("it has ended, or was interrupted")

    def _collect_buffers(self, flags: int = 0) -> bool:
        """Collect some buffers that the receiver has returned. Return False if it has ended."""
        # waits: limited by the socket's timeout
        record = self.connection.recv(_MAX_RECORD_BYTES, flags)
        returned = [self._buffers[number] for number, _ in _HEADER.iter_unpack(record)]
        self._free += returned
        self._unread_bytes -= sum(buffer.size for buffer in returned)
        return bool(record)


class _Inbox:
    """Messages from one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffers: list[_Buffer] = []
        self._expected: collections.deque[torch.Tensor] = collections.deque()
        self._num_expected = self._num_received = 0
        self._unreturned = b""

    def expect(self, tensor: torch.Tensor) -> int:
        """Let the next message that nobody awaits yet go into `tensor`, and return its number."""
        self._expected.append(tensor)
        self._num_expected += 1
        return self._num_expected

    def receive_until(self, number: int) -> None:
        """Wait for all messages up to one."""
        while self._num_received < number:
            self._receive(self._expected[0])
            self._expected.popleft()
            self._num_received += 1

    def _receive(self, tensor: torch.Tensor) -> None:
        # waits: limited by the socket's timeout
        record, attached, _, _ = self.connection.recvmsg(_HEADER.size, _DESCRIPTOR_SPACE)
        if not record:
            raise ConnectionResetError("it has ended, or was interrupted")
        number, size = _HEADER.unpack(record)
        for _, _, data in attached:
            (descriptor,) = _DESCRIPTOR.unpack(data)
            try:
                self._buffers.append(_Buffer(descriptor, number, size))
            finally:
                os.close(descriptor)
        if tensor.nbytes:
            tensor.copy_(self._buffers[number].view_as(tensor))
        self._return_buffer(number)

    def _return_buffer(self, number: int) -> None:
        """Return a buffer to the sender; with a later one if its socket is full, and not at all if it has ended."""
        self._unreturned += _HEADER.pack(number, _NO_SIZE)
        with contextlib.suppress(OSError):
            self.connection.send(self._unreturned[:_MAX_RECORD_BYTES], socket.MSG_DONTWAIT)
            self._unreturned = self._unreturned[_MAX_RECORD_BYTES:]

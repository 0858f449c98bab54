"""A packed object on its way to an engine or back: in shared memory on one host, else inline."""

from __future__ import annotations

import dataclasses
import socket
from typing import TYPE_CHECKING, Any

from dtkit.rpc import pickling, shared_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit._util.process import ProcessId
    from dtkit.rpc.transport import Hosts

_MAX_INLINE_BYTES = 256 * 1024
"""Largest size that is sent inline instead of in a file."""


@dataclasses.dataclass(frozen=True)
class Payload:
    """Header of an object, and where its buffers are: in a file, inline, or (neither) with rank 0."""

    header: bytes
    sizes: tuple[int, ...]
    shared_buffer: shared_memory.SharedBuffer | None = None
    inline_buffers: tuple[bytes, ...] | None = None
    host_buffers: Mapping[str, shared_memory.SharedBuffer] | None = None
    """Place of the buffers on each of several hosts, by hostname."""
    is_broadcast: bool = False
    """Whether rank 0 broadcasts the buffers to the other ranks."""

    @property
    def nbytes(self) -> int:
        """Size of the buffers."""
        return sum(self.sizes)

    def for_broadcast(self, rank: int) -> Payload:
        """Return the payload for a rank if rank 0 broadcasts the buffers."""
        if rank == 0:
            return dataclasses.replace(self, is_broadcast=True)
        return dataclasses.replace(self, shared_buffer=None, inline_buffers=None, is_broadcast=True)

    def open_buffers(self) -> Sequence[Any] | None:
        """Return the buffers, mapped copy-on-write or inline; None if rank 0 has them."""
        if self.host_buffers is not None:
            return shared_memory.map_buffers(self.host_buffers[socket.gethostname()])
        if self.shared_buffer is not None:
            return shared_memory.map_buffers(self.shared_buffer)
        return None if self.inline_buffers is None else [bytearray(b) for b in self.inline_buffers]

    def load(self, buffers: Sequence[Any] | None = None) -> Any:
        """Build the object on top of its buffers, or of `buffers` that rank 0 has sent."""
        buffers = self.open_buffers() if buffers is None else buffers
        assert buffers is not None, "a payload without buffers needs them from rank 0"
        return pickling.unpack_object(self.header, buffers)

    def discard(self) -> None:
        """Delete the file, if there is one. Mappings of it stay valid."""
        if self.shared_buffer is not None:
            shared_memory.remove_file(self.shared_buffer)


def make_payload(
    packed: pickling.PackedObject, file_owner: ProcessId | None, max_inline_bytes: int = _MAX_INLINE_BYTES
) -> Payload:
    """Make a payload. Without a file owner, for another host, everything goes inline."""
    if file_owner is None or is_small(packed, max_inline_bytes):
        return Payload(packed.header, packed.sizes, inline_buffers=tuple(bytes(b) for b in packed.buffers))
    return Payload(
        packed.header, packed.sizes, shared_buffer=shared_memory.write_buffers(packed.buffers, file_owner=file_owner)
    )


def make_host_payload(packed: pickling.PackedObject, hosts: Hosts) -> Payload:
    """Make a payload with one copy of the buffers on each host."""
    if is_small(packed):
        return make_payload(packed, None)
    return Payload(packed.header, packed.sizes, host_buffers=hosts.write_buffers(packed.buffers))


def is_small(packed: pickling.PackedObject, max_inline_bytes: int = _MAX_INLINE_BYTES) -> bool:
    """Return whether the buffers are too small for a file of their own."""
    return packed.nbytes - len(packed.header) <= max_inline_bytes

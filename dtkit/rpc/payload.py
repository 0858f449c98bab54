"""A packed object on its way to an engine, or back: by shared memory where both ends share a host, else inline."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit.rpc import pickling, shared_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_INLINE_BYTES = 256 * 1024  # bytes that go inline: a file is not worth it


@dataclasses.dataclass(frozen=True)
class Payload:
    """The skeleton of an object and where its buffers are: in a file, inline, or (neither) with rank 0."""

    header: bytes
    sizes: tuple[int, ...]
    shared_buffer: shared_memory.SharedBuffer | None = None
    inline_buffers: tuple[bytes, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(self.sizes)

    def without_buffers(self) -> Payload:
        """For ranks that get the buffers from rank 0."""
        return dataclasses.replace(self, shared_buffer=None, inline_buffers=None)

    def open_buffers(self) -> Sequence[Any] | None:
        """The buffers: mapped copy-on-write, or inline. None where rank 0 has them."""
        if self.shared_buffer is not None:
            return shared_memory.BufferMapping.open(self.shared_buffer)
        return None if self.inline_buffers is None else [bytearray(b) for b in self.inline_buffers]

    def load(self, buffers: Sequence[Any] | None = None) -> Any:
        """The object, built on top of its buffers (or on those that came another way)."""
        found = self.open_buffers() if buffers is None else buffers
        assert found is not None, "a shipment without buffers needs them from rank 0"
        return pickling.unpack_object(self.header, found)

    def discard(self) -> None:
        """Delete the file, if there is one. Those who mapped it keep what they mapped."""
        if self.shared_buffer is not None:
            shared_memory.remove_file(self.shared_buffer)


def make_payload(
    packed: pickling.PackedObject, file_owner: shared_memory.ProcessId | None, max_inline_bytes: int = _MAX_INLINE_BYTES
) -> Payload:
    """Put a packed object on its way. `owner` None: the other end is on another host, so everything goes inline."""
    if file_owner is None or packed.nbytes - len(packed.header) <= max_inline_bytes:
        return Payload(packed.header, packed.sizes, inline_buffers=tuple(bytes(b) for b in packed.buffers))
    return Payload(
        packed.header, packed.sizes, shared_buffer=shared_memory.write_buffers(packed.buffers, file_owner=file_owner)
    )

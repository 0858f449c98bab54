"""A packed object on its way to an engine, or back: by shared memory where both ends share a host, else inline."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit.rpc import pickling, shared_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALL = 256 * 1024  # bytes that go inline: a file is not worth it


@dataclasses.dataclass(frozen=True)
class Shipment:
    """The skeleton of an object and where its buffers are: in a file, inline, or (neither) with rank 0."""

    skeleton: bytes
    sizes: tuple[int, ...]
    handle: shared_memory.Handle | None = None
    inline: tuple[bytes, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(self.sizes)

    def without_buffers(self) -> Shipment:
        """For ranks that get the buffers from rank 0."""
        return dataclasses.replace(self, handle=None, inline=None)

    def buffers(self) -> Sequence[Any] | None:
        """The buffers: mapped copy-on-write, or inline. None where rank 0 has them."""
        if self.handle is not None:
            return shared_memory.Mapping.open(self.handle)
        return None if self.inline is None else [bytearray(b) for b in self.inline]

    def unload(self, buffers: Sequence[Any] | None = None) -> Any:
        """The object, built on top of its buffers (or on those that came another way)."""
        found = self.buffers() if buffers is None else buffers
        assert found is not None, "a shipment without buffers needs them from rank 0"
        return pickling.unpack(self.skeleton, found)

    def discard(self) -> None:
        """Delete the file, if there is one. Those who mapped it keep what they mapped."""
        if self.handle is not None:
            shared_memory.remove(self.handle)


def ship(packed: pickling.Packed, owner: shared_memory.Owner | None, small: int = _SMALL) -> Shipment:
    """Put a packed object on its way. `owner` None: the other end is on another host, so everything goes inline."""
    if owner is None or packed.nbytes - len(packed.skeleton) <= small:
        return Shipment(packed.skeleton, packed.sizes, inline=tuple(bytes(b) for b in packed.buffers))
    return Shipment(packed.skeleton, packed.sizes, handle=shared_memory.write(packed.buffers, owner=owner))

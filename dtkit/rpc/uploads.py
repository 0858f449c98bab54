"""Objects on their way from the notebook to the engines of one group."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dtkit.rpc import pickling, user_modules
from dtkit.rpc.payload import Payload, make_payload

if TYPE_CHECKING:
    from dtkit.rpc.membership import Membership


class Uploads:
    """Pickles objects for a group's engines, and deletes the shared files when they are no longer needed."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._payloads: list[Payload] = []

    def pack(self, obj: Any, name: str | None = None) -> pickling.PackedObject:
        """Pickle an object, with its arrays and tensors apart. Modules that engines can't import travel by value."""
        return pickling.pack_object(obj, by_value=self._find_modules(), name=name)

    def dumps(self, obj: Any, name: str | None = None) -> bytes:
        """Pickle a small object into one string of bytes."""
        return pickling.dumps(obj, self._find_modules(), name=name)

    def upload(self, packed: pickling.PackedObject) -> Payload:
        """Put a packed object where all engines can load it, until `discard`."""
        membership = self._membership
        payload = make_payload(packed, membership.config.file_owner if membership.is_single_host else None)
        self._payloads.append(payload)
        return payload

    def discard(self, payload: Payload) -> None:
        """Delete an upload that no engine will open again."""
        payload.discard()
        with contextlib.suppress(ValueError):
            self._payloads.remove(payload)

    def discard_all(self) -> None:
        """Delete all uploads."""
        for payload in self._payloads:
            payload.discard()

    def _find_modules(self) -> Any:
        return user_modules.find_user_modules(self._membership.engine_sys_path)

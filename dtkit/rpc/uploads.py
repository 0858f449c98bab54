"""Objects that the notebook sends to the engines of one group."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dtkit.rpc import pickling, user_modules
from dtkit.rpc.payload import Payload, make_host_payload, make_payload

if TYPE_CHECKING:
    from dtkit.rpc.membership import Membership


class Uploads:
    """Pickles objects for a group's engines, and deletes the shared files when they are no longer needed."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._payloads: list[Payload] = []

    def pack(self, obj: Any, name: str | None = None) -> pickling.PackedObject:
        """Pickle an object, with its arrays and tensors in buffers. Modules that engines can't import are pickled by
        value.
        """
        return pickling.pack_object(obj, by_value=self._find_modules(), name=name)

    def dumps(self, obj: Any, name: str | None = None) -> bytes:
        """Pickle a small object into one string of bytes."""
        return pickling.dumps(obj, self._find_modules(), name=name)

    def upload(self, packed: pickling.PackedObject, *, inline: bool = False) -> Payload:
        """Store a packed object where all engines can load it, until `discard`. With `inline`, it is part of the
        message.
        """
        membership, hosts = self._membership, self._membership.hosts
        if hosts is None:
            payload = make_payload(packed, membership.config.file_owner if membership.is_single_host else None)
        elif inline:
            payload = make_payload(packed, None)
        else:
            payload = make_host_payload(packed, hosts)
        self._payloads.append(payload)
        return payload

    def discard(self, payload: Payload) -> None:
        """Delete an upload that no engine will open again."""
        self._remove_files(payload)
        with contextlib.suppress(ValueError):
            self._payloads.remove(payload)

    def discard_all(self) -> None:
        """Delete all uploads."""
        for payload in self._payloads:
            self._remove_files(payload)

    def _remove_files(self, payload: Payload) -> None:
        payload.discard()
        if payload.host_buffers is not None and (hosts := self._membership.hosts) is not None:
            hosts.remove_buffers(payload.host_buffers)

    def _find_modules(self) -> Any:
        return user_modules.find_user_modules(self._membership.engine_sys_path)

"""Which ranks have joined, and the operations in which they must take part, kept in the group's store.

A joined rank doesn't know the others' operations. To save time, ranks don't check before each operation whether a rank
has joined. Instead, a rank that has waited for a while reads the store. If a rank has joined, the waiting rank
publishes its current operation, and later operations before they begin. The joined rank takes part with zeros.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from dtkit.integrations import timeouts

if TYPE_CHECKING:
    from collections.abc import Callable


class JoinBoard:
    """One rank's view of the joins of a group. An *epoch* ends when all ranks have joined."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._epoch = 0
        self._position = 0  # operations that this rank has begun
        self._make_signature: Callable[[], dict[str, Any]] | None = None
        self._is_active = False  # whether a rank has joined, so that operations must be published
        # locks: while an operation begins, and writes one key of the store
        self._lock = threading.Lock()

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("dtkit-horovod-join", self._epoch, *parts)))

    def begin(self, make_signature: Callable[[], dict[str, Any]]) -> None:
        """Count an operation that is about to begin."""
        with self._lock:
            self._make_signature = make_signature
            self._position += 1
            if self._is_active:
                self._publish()

    def look(self) -> None:
        """Publish the current operation if a rank has joined. The caller has waited for it for a while."""
        with self._lock:
            if self._is_active or self._make_signature is None or not self._store.check([self._key("joined")]):
                return
            self._is_active = True
            self._publish()

    def _publish(self) -> None:
        assert self._make_signature is not None
        self._store.set(self._key("operation", self._position), json.dumps(self._make_signature()))

    def join(self, mirror: Callable[[dict[str, Any]], None]) -> int:
        """Take part in the others' operations until all ranks have joined; return the rank that joined last."""
        self._store.set(self._key("position", self._rank), str(self._position))
        self._store.set(self._key("joined"), "1")
        if self._store.add(self._key("count"), 1) == self._size:
            self._store.set(self._key("last"), str(self._rank))
        pause = threading.Event()
        while not self._have_all_arrived():
            key = self._key("operation", self._position + 1)
            if not self._store.check([key]):
                pause.wait(timeouts.HOROVOD_CYCLE_S)
                continue
            mirror(json.loads(self._store.get(key)))
            self._position += 1
        last = int(self._store.get(self._key("last")))
        with self._lock:
            self._epoch += 1
            self._is_active, self._make_signature = False, None
        return last

    def _have_all_arrived(self) -> bool:
        if not self._store.check([self._key("last")]):
            return False
        positions = [int(self._store.get(self._key("position", rank))) for rank in range(self._size)]
        return self._position >= max(positions)

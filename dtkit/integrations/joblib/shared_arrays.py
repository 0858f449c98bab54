"""Large arguments of joblib's tasks, stored once in shared memory. Engines get views of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload

LARGE_BYTES = 2**20

TaskCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Function, arguments and keyword arguments."""


@dataclasses.dataclass(frozen=True)
class SharedArray:
    """Stands for an array in the arguments of a task."""

    payload: Payload


class ArrayShare:
    """Arrays that were placed, by their identity."""

    def __init__(self, engine_group: EngineGroup) -> None:
        self._group = engine_group
        # Keeps each array alive, so that no other array gets its id.
        self._placed: dict[int, tuple[np.ndarray, SharedArray]] = {}

    def replace(self, call: TaskCall) -> TaskCall:
        """Return a call whose large arrays are placed in shared memory."""
        function, args, kwargs = call
        return function, tuple(map(self._place, args)), {name: self._place(value) for name, value in kwargs.items()}

    def _place(self, value: Any) -> Any:
        if type(value) is not np.ndarray or value.dtype.hasobject or value.nbytes < LARGE_BYTES:
            return value
        if id(value) not in self._placed:
            uploads = self._group.uploads
            self._placed[id(value)] = value, SharedArray(uploads.upload(uploads.pack(value)))
        return self._placed[id(value)][1]

    def discard(self) -> None:
        """Free the shared memory."""
        for _, shared in self._placed.values():
            self._group.uploads.discard(shared.payload)
        self._placed.clear()


def load_arrays(call: TaskCall) -> TaskCall:
    """Return a call with read-only views of the placed arrays, on an engine."""
    function, args, kwargs = call
    return function, tuple(map(_load, args)), {name: _load(value) for name, value in kwargs.items()}


def _load(value: Any) -> Any:
    if not isinstance(value, SharedArray):
        return value
    array: np.ndarray = value.payload.load()
    array.flags.writeable = False  # like joblib's own memory maps, so that tasks can't change each other's arguments
    return array

"""Large arguments of joblib's tasks, stored once in shared memory. Engines get views of them."""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.pickling import PackedObject

LARGE_BYTES = 2**20

TaskCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Function, arguments and keyword arguments."""


@dataclasses.dataclass(frozen=True)
class SharedArray:
    """Stands for an array, a DataFrame or a sparse matrix in the arguments of a task."""

    payload: Payload


@dataclasses.dataclass
class _Placed:
    """A value in shared memory."""

    value: Any
    """Keeps the value alive, so that no other one gets its id."""
    shared: SharedArray
    checksum: int
    call: int
    """Number of the last parallel call that has compared the checksum."""


class ArrayShare:
    """Values that were placed, by their identity. A parallel call places again what has changed since the last."""

    def __init__(self, engine_group: EngineGroup) -> None:
        self._group = engine_group
        self._placed: dict[int, _Placed] = {}
        self._outdated: list[SharedArray] = []
        self._call = 0

    def begin_call(self) -> None:
        """Note that another parallel call begins. Values may have been changed since the last one."""
        self._call += 1

    def replace(self, call: TaskCall) -> TaskCall:
        """Return a call whose large arguments are placed in shared memory."""
        function, args, kwargs = call
        return function, tuple(map(self._place, args)), {name: self._place(value) for name, value in kwargs.items()}

    def _place(self, value: Any) -> Any:
        if _compute_size(value) < LARGE_BYTES:
            return value
        placed = self._placed.get(id(value))
        if placed is not None and placed.call == self._call:
            return placed.shared
        packed = self._group.uploads.pack(value)
        checksum = _compute_checksum(packed)
        if placed is None or placed.checksum != checksum:
            if placed is not None:
                self._outdated.append(placed.shared)  # tasks of the last call may not have opened it yet
            shared = SharedArray(self._group.uploads.upload(packed))
            placed = self._placed[id(value)] = _Placed(value, shared, checksum, self._call)
        placed.call = self._call
        return placed.shared

    def discard(self) -> None:
        """Free the shared memory."""
        for shared in (*self._outdated, *(placed.shared for placed in self._placed.values())):
            self._group.uploads.discard(shared.payload)
        self._placed.clear()
        self._outdated.clear()


def _compute_size(value: Any) -> int:
    """Return the bytes of an array, a DataFrame or a sparse matrix; 0 for anything else."""
    if type(value) is np.ndarray:
        return 0 if value.dtype.hasobject else value.nbytes
    package = type(value).__module__.partition(".")[0]
    if package == "pandas" and hasattr(value, "memory_usage"):
        return int(np.sum(value.memory_usage(index=False)))
    return int(getattr(getattr(value, "data", None), "nbytes", 0)) if package == "scipy" else 0


def _compute_checksum(packed: PackedObject) -> int:
    checksum = zlib.crc32(packed.header)
    for buffer in packed.buffers:
        checksum = zlib.crc32(buffer, checksum)
    return checksum


def load_arrays(call: TaskCall) -> TaskCall:
    """Return a call with views of the placed values, on an engine."""
    function, args, kwargs = call
    return function, tuple(map(_load, args)), {name: _load(value) for name, value in kwargs.items()}


def _load(value: Any) -> Any:
    if not isinstance(value, SharedArray):
        return value
    loaded = value.payload.load()
    if isinstance(loaded, np.ndarray):
        loaded.flags.writeable = False  # like joblib's own memory maps, so that tasks can't change their arguments
    return loaded

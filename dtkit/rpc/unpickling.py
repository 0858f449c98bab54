"""Unpickling that leaves this process's own classes as they are.

cloudpickle sends a class of a notebook by value. Where such a class returns to the process that defined it, cloudpickle
finds the class, and then sets all its attributes again, to copies. Its methods would then read and write copies of the
notebook's global variables, so that a callback's counter would never change.
"""

from __future__ import annotations

import io
import pickle
import weakref
from typing import TYPE_CHECKING, Any

from dtkit._util.torch_private import class_trackers, make_skeleton_class, make_skeleton_enum, set_class_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAKERS = (make_skeleton_class, make_skeleton_enum)
_received: weakref.WeakSet[type] = weakref.WeakSet()  # another process defined them, and may send them changed


class ClassKeepingUnpickler(pickle.Unpickler):
    """Unpickler that changes no attribute of a class that this process has defined."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a member of a module, with cloudpickle's functions that build classes replaced."""
        member = super().find_class(module, name)
        if any(member is make for make in _MAKERS):
            return lambda *arguments: _make_class(member, arguments)
        return _set_class_state if member is set_class_state else member


def unpickle(data: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Build an object as ``pickle.loads`` does, without a change to this process's own classes."""
    return ClassKeepingUnpickler(io.BytesIO(data), buffers=buffers).load()


def _make_class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Find the class by its identifier, or make it, without its attributes."""
    *_, identifier, _extra = arguments
    is_known = identifier in class_trackers
    made = make(*arguments)
    if not is_known:
        _received.add(made)
    return made


def _set_class_state(made: type, state: Any) -> type:
    """Set the attributes of a class that another process has defined."""
    return set_class_state(made, state) if made in _received else made

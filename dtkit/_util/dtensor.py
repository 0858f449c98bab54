"""Tells DTensors from plain tensors without loading torch's module of them, which takes a second and more.

Who has a DTensor has loaded the module. Data parallelism on whole models never does.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor."""
    return is_dtensor_type(type(value))


def is_dtensor_type(kind: type) -> bool:
    """Return whether a class is DTensor or derived from it."""
    module = sys.modules.get("torch.distributed.tensor")
    dtensor = getattr(module, "DTensor", None)  # another thread may be loading it
    return dtensor is not None and issubclass(kind, dtensor)

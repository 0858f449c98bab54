"""Pickling of modules with parametrizations, such as weight normalization in models for speech.

``torch.nn.utils.parametrize`` gives each such module a class of its own, which refuses to be pickled. Another process
makes that class again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def reduce_parametrized(obj: Any) -> tuple[Any, ...] | None:
    """Return the reduce value of a module with parametrizations; None for any other object."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    kind = type(obj)
    if parametrize is None or "__getstate__" not in vars(kind) or not parametrize.is_parametrized(obj):
        return None
    return _make_empty, (kind.__base__,), vars(obj), None, None, _set_state


def _make_empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    from dtkit._util.torch_private import inject_parametrized_class, inject_parametrized_property

    module.__setstate__(state)  # type: ignore[no-untyped-call]
    inject_parametrized_class(module)
    for name in state["_modules"]["parametrizations"]:
        inject_parametrized_property(module, name)

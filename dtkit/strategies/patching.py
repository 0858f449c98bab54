"""Temporary replacement of a module's functions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType


@contextlib.contextmanager
def replace_functions(module: ModuleType, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a module by name within the context."""
    namespace = vars(module)
    originals = {name: namespace[name] for name in replacements}
    namespace.update(replacements)
    try:
        yield
    finally:
        namespace.update(originals)

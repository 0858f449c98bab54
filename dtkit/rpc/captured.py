"""Large objects that are sent with a function, because it uses them."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit._util.stacklevel import find_caller_stacklevel

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGE_BYTES = 50 * 2**20


def warn_of_large_functions(name: str, functions: Sequence[Any]) -> None:
    """Warn if arrays and tensors that functions use from outside have more than 50 MB."""
    captured = {key: size for function in functions for key, size in _measure_captured(function).items()}
    if sum(captured.values()) <= LARGE_BYTES:
        return
    largest = sorted(captured, key=lambda key: -captured[key])[:3]
    shown = ", ".join(f"{key} ({formatting.format_bytes(captured[key])})" for key in largest)
    warnings.warn(
        f"{name} takes along {shown}, and each call sends it again. Place data once with cluster.partition() and "
        "models with cluster.broadcast(), or load files on the engines",
        stacklevel=find_caller_stacklevel(),
    )


def _measure_captured(function: Any) -> dict[str, int]:
    """Return the bytes of arrays and tensors that a function uses from outside, by name."""
    try:
        used = inspect.getclosurevars(function)
    except TypeError:  # not a Python function
        return {}
    values = {**used.globals, **used.nonlocals}
    return {key: value.nbytes for key, value in values.items() if isinstance(getattr(value, "nbytes", None), int)}

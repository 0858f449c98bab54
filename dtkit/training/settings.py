"""The arguments of a training as the user typed them, such as the source of a lambda instead of ``<lambda>``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import linecache
import types
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting

if TYPE_CHECKING:
    from dtkit.training.config import TrainConfig
    from dtkit.types import RunSpec

_MAX_CHARS = 160
_IN_SPEC = frozenset(
    {"batch_size", "epochs", "steps", "strategy", "shuffle", "seed", "start", "name", "tags", "num_workers"}
)
"""Arguments that are fields of a run's spec."""


def describe_settings(config: TrainConfig) -> tuple[tuple[str, str], ...]:
    """Return (name, text) of the arguments that differ from their defaults and aren't fields of a spec."""
    return tuple(
        (field.name, describe_value(value))
        for field in dataclasses.fields(config)
        if field.name not in _IN_SPEC and not _is_default(value := getattr(config, field.name), field)
    )


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    return value is field.default or (isinstance(value, bool | int | float | str | tuple) and value == field.default)


def describe_value(value: Any) -> str:
    """Return a value as text: a lambda's source, a function's name, a short repr, else the class."""
    if isinstance(value, types.FunctionType):
        return _describe_function(value)
    if isinstance(value, type | types.BuiltinFunctionType | types.MethodType):
        return value.__name__
    if isinstance(value, functools.partial):
        arguments = [*map(describe_value, value.args), *(f"{k}={describe_value(v)}" for k, v in value.keywords.items())]
        return f"partial({', '.join([describe_value(value.func), *arguments])})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {describe_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple) and len(value) <= 10:
        shape = "[{}]" if isinstance(value, list) else "({})"
        return shape.format(", ".join(map(describe_value, value)))
    return _describe_by_repr(value)


def _describe_by_repr(value: Any) -> str:
    """Return a repr of one line without an address, else the class, with its length if it has one."""
    name = type(value).__name__
    if isinstance(value, bool | int | float | str | None):
        return formatting.sanitize_text(repr(value), _MAX_CHARS)
    if hasattr(value, "shape") or hasattr(value, "__len__"):
        return f"{name} of {len(value):,}" if hasattr(value, "__len__") else name
    text = repr(value)
    return text if len(text) <= _MAX_CHARS and "\n" not in text and " at 0x" not in text else name


def _describe_function(function: types.FunctionType) -> str:
    if function.__name__ != "<lambda>":
        return function.__name__
    body = _read_body(function.__code__)
    if body is None:
        return "a lambda"
    return formatting.sanitize_text(f"lambda{_format_parameters(function)}: {body}", _MAX_CHARS)


def _format_parameters(function: types.FunctionType) -> str:
    text = str(inspect.signature(function))[1:-1]
    return f" {text}" if text else ""


def _read_body(code: types.CodeType) -> str | None:
    """Return the source of a lambda's body, found by the positions of its instructions; None without a source."""
    spans = [
        (line, column, end_line, end_column)
        for line, end_line, column, end_column in code.co_positions()
        if line is not None and column is not None and end_line is not None and end_column and end_column > column >= 0
    ]
    if not spans:
        return None
    first = min(span[:2] for span in spans)
    last = max(span[2:] for span in spans)
    lines = [linecache.getline(code.co_filename, number) for number in range(first[0], last[0] + 1)]
    if not all(lines):
        return None
    # Columns count the bytes of UTF-8.
    parts = [line.encode() for line in lines]
    parts[-1] = parts[-1][: last[1]]
    parts[0] = parts[0][first[1] :]
    return " ".join(b" ".join(parts).decode(errors="replace").split())


def get_step_settings(spec: RunSpec) -> tuple[object, ...]:
    """Return the settings for which a measured time of a step counts: a node may have been left out since."""
    return spec.world_size, spec.batch_size, spec.strategy

"""The arguments of a training as the user typed them, such as the source of a lambda instead of ``<lambda>``.

A function comes with the values that it closes over: ``lambda p: SGD(p, lr=lr), where lr=0.1``. Secrets are hidden.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import itertools
import types
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit._util.redaction import HIDDEN, hide_secrets, is_secret_name
from dtkit.training.function_sources import read_sources
from dtkit.training.lambda_source import read_body

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.training.config import TrainConfig
    from dtkit.types import RunSpec

_PREPARING = frozenset({"RESUME", "PRECALL", "KW_NAMES", "PUSH_NULL", "COPY_FREE_VARS", "MAKE_CELL", "CACHE", "NOP"})
"""Operations of Python's bytecode that neither load nor call anything."""
_MAX_CHARS, _MAX_NAME_CHARS, _MAX_NAMES = 160, 40, 5
_PLAIN = (bool, int, float, str)
WHERE = ", where "
"""What is between a function and the values of names that it reads from outside."""
_IN_SPEC = frozenset(
    {"batch_size", "epochs", "steps", "strategy", "shuffle", "seed", "start", "name", "tags", "num_workers"}
)
"""Arguments that are fields of a run's spec."""
_DATA = frozenset({"validation", "target", "columns"})


def describe_settings(config: TrainConfig) -> tuple[tuple[str, str], ...]:
    """Return (name, text) of the arguments that differ from their defaults and aren't fields of a spec."""
    return tuple(
        (field.name, describe_value(value))
        for field in dataclasses.fields(config)
        if field.name not in _IN_SPEC and not _is_default(value := getattr(config, field.name), field)
    )


def collect_sources(config: TrainConfig) -> tuple[tuple[str, str], ...]:
    """Return (name, source) of the arguments that are functions or objects of the user, or have some in them."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in _DATA]
    sources = {name: read_sources(getattr(config, name)) for name in names}
    return tuple((name, source) for name, source in sources.items() if source)


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    return value is field.default or (isinstance(value, bool | int | float | str | tuple) and value == field.default)


def describe_value(value: Any) -> str:
    """Return a value as text: a lambda's source, a function's name, a short repr, else the class."""
    return hide_secrets(_describe_value(value))


def _describe_value(value: Any) -> str:
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
    if text == f"{name}()":  # torch's losses leave their options out
        return f"{name}({', '.join(_list_options(value))})"
    return text if len(text) <= _MAX_CHARS and "\n" not in text and " at 0x" not in text else name


def _list_options(value: Any) -> Iterator[str]:
    """Return the arguments of an object that it keeps by their names, and that differ from their defaults."""
    try:
        parameters = inspect.signature(type(value)).parameters
    except (TypeError, ValueError):  # a class of C has none
        return
    for name, parameter in parameters.items():
        own = getattr(value, name, parameter.default)
        if isinstance(own, _PLAIN) and own != parameter.default:
            yield f"{name}={own!r}"


def _describe_function(function: types.FunctionType) -> str:
    names = _read_names(function)
    where = formatting.sanitize_text(", ".join(itertools.islice(names, _MAX_NAMES)), _MAX_CHARS // 2)
    where = f"{WHERE}{where}" if where else ""
    if function.__name__ != "<lambda>":
        return function.__name__ + where
    body = read_body(function.__code__)
    body = body or _describe_only_call(function)  # without a source, as in python -c
    text = "a lambda" if body is None else hide_secrets(f"lambda{_format_parameters(function)}: {body}")
    return formatting.sanitize_text(text, _MAX_CHARS - len(where)) + where


def _describe_only_call(function: types.FunctionType) -> str | None:
    """Return ``torch.optim.Adam(...)`` for code that only calls this function; None for any other code."""
    steps = [step for step in dis.get_instructions(function) if step.opname not in _PREPARING]
    calls = [step for step in steps if step.opname.startswith("CALL")]
    if len(calls) != 1 or len(steps) < 2 or steps[-2] is not calls[0] or not steps[0].opname.startswith("LOAD_GLOBAL"):
        return None
    further = itertools.takewhile(lambda step: step.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[1:])
    return f"{'.'.join(str(step.argval) for step in (steps[0], *further))}(...)"


def _read_names(function: types.FunctionType) -> Iterator[str]:
    """Return the plain values of names outside of a function: those it closes over, and a lambda's global ones."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    is_lambda = function.__name__ == "<lambda>"  # other functions have too many
    used = [step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"] if is_lambda else []
    for name in dict.fromkeys([*cells, *used]):
        try:
            value = cells[name].cell_contents if name in cells else function.__globals__.get(name)
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, _PLAIN):
            is_hidden = isinstance(value, str) and is_secret_name(name)
            yield f"{name}={formatting.sanitize_text(repr(HIDDEN if is_hidden else value), _MAX_NAME_CHARS)}"


def _format_parameters(function: types.FunctionType) -> str:
    text = str(inspect.signature(function))[1:-1]
    return f" {text}" if text else ""


def get_step_settings(spec: RunSpec) -> tuple[object, ...]:
    """Return the settings for which a measured time of a step counts: a node may have been left out since."""
    return spec.world_size, spec.batch_size, spec.strategy

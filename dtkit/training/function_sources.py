"""Sources of the functions and classes that a user gave to a training, by which runs with equal names are told apart.

Functions of installed packages are left out, since their names tell them apart.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from typing import TYPE_CHECKING, Any

from dtkit._util.redaction import hide_secrets
from dtkit.health.frames import classify_file
from dtkit.training.lambda_source import read_body

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_CHARS = 4000  # of a setting; a run keeps them with its settings
_MAX_DEPTH, _MAX_PARTS = 4, 20  # a longer list is data


def read_sources(value: Any) -> str:
    """Return the source of each function and class of the user in an argument of `train`; "" if there is none.

    A source without a file has the digest of its bytecode. Secrets are hidden.
    """
    text = "\n".join(dict.fromkeys(_read_source(each) for each in _iterate_functions(value, _MAX_DEPTH)))
    text = hide_secrets(text)
    if len(text) <= _MAX_CHARS:
        return text
    return f"{text[:_MAX_CHARS]}\n... cut; {_digest(text.encode())} is the digest of all"


def _iterate_functions(value: Any, depth: int) -> Iterator[types.FunctionType | type]:
    if isinstance(value, functools.partial):
        parts: list[Any] = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        own = value.__func__ if isinstance(value, types.MethodType) else value
        if not isinstance(own, types.FunctionType | type):
            own = type(own)
        if _is_own(own):
            yield own
        return
    if depth and len(parts) <= _MAX_PARTS:
        for part in parts:
            yield from _iterate_functions(part, depth - 1)


def _is_own(function: Any) -> bool:
    """Return whether a function or class is the user's, and not one of an installed package."""
    try:
        file = inspect.getfile(function)
    except (TypeError, OSError):  # built in, or without a file
        return bool(function.__module__ == "__main__")
    return file == "<string>" or classify_file(file) == "user"  # exec() has made a function of the former


def _read_source(function: types.FunctionType | type) -> str:
    if isinstance(function, types.FunctionType) and function.__name__ == "<lambda>":
        return read_body(function.__code__) or _describe_code(function)
    try:
        return inspect.cleandoc(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError):
        return _describe_code(function)


def _describe_code(function: types.FunctionType | type) -> str:
    if not isinstance(function, types.FunctionType):  # of a notebook, which has no file: by its methods
        methods = (value for value in vars(function).values() if isinstance(value, types.FunctionType))
        return "\n".join([f"class {function.__name__}:", *map(_read_source, methods)])
    return f"no source; bytecode {_digest(b''.join(_iterate_code(function.__code__)))}"


def _iterate_code(code: types.CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _iterate_code(value)
        elif isinstance(value, frozenset):  # whose order differs in each process
            yield repr(sorted(map(repr, value))).encode()
        else:
            yield repr(value).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]

"""Errors for objects that can't be pickled, which name the smallest part that can't."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import TYPE_CHECKING, Any, NoReturn

from dtkit._util.guard import return_error, run_guarded
from dtkit.errors import SerializationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PICKLE_PROTOCOL = 5
_ARGUMENTS = {
    "train.loss_fn.loss_fn": "loss",
    "train.loss_fn.training_step": "training_step",
    **{f"train.{name}": name for name in ("optimizer", "strategy", "lr_scheduler", "on_engine", "sampler")},
}
"""Arguments of `cluster.train` by their places in what is sent."""
RESULT_NAME = "the function's result"
"""Name of an object that an engine returns."""
_SENT_ADVICE = (
    "What is sent to an engine must be picklable. Create it on the engine (in the function, or at the first forward), "
    "or leave it out of the object's state with __getstate__."
)
_RESULT_ADVICE = (
    "What a function returns to the notebook must be picklable. Return plain values or tensors that are computed from "
    "it, or None."
)


def raise_serialization_error(
    obj: Any, name: str | None, error: Exception, try_pickle: Callable[[Any], None]
) -> NoReturn:
    """Raise SerializationError for an object, called `name`, whose pickling raised `error`."""
    path, cause = _find_smallest_failing_part(obj, name or _get_default_name(obj), error, try_pickle)
    advice = _RESULT_ADVICE if name == RESULT_NAME else _SENT_ADVICE
    raise SerializationError(f"{_name_argument(path)}: {_get_first_line(cause)}. {advice}") from cause


def _name_argument(path: str) -> str:
    """Return the path from the argument that the user gave, where it leads through dtkit's own objects."""
    for inner, argument in _ARGUMENTS.items():
        rest = path.removeprefix(inner)
        if rest != path and not rest[:1].isalnum() and rest[:1] != "_":
            return f"{argument}{rest}" if rest[:1] in (".", "[") else f"{argument}={rest}"
    return path


def _get_default_name(obj: Any) -> str:
    named = isinstance(obj, type | types.FunctionType | types.MethodType | types.ModuleType)
    return str(obj.__name__) if named else type(obj).__name__


def _get_first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def _find_smallest_failing_part(
    obj: Any, path: str, error: Exception, try_pickle: Callable[[Any], None]
) -> tuple[str, Exception]:
    """Follow the parts that can't be pickled down to the innermost one. Return its path and its error."""
    seen = {id(obj)}
    # An object that is nested too deeply fails as a whole, not by a part.
    while not isinstance(error.__cause__, RecursionError):
        for step, part in _iterate_parts(obj):
            if id(part) in seen:
                continue
            seen.add(id(part))
            cause = run_guarded(functools.partial(try_pickle, part), return_error)
            if cause is not None:
                obj, path, error = part, path + step, cause
                break
        else:
            break
    return path, error


def _iterate_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of `obj` that pickle would visit, each with its suffix to the object's name."""
    if isinstance(obj, types.FunctionType):
        yield from _iterate_function_parts(obj)
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, functools.partial):
        yield from ((f".{key}", getattr(obj, key)) for key in ("func", "args", "keywords"))
    elif isinstance(obj, type | types.ModuleType):
        yield from ((f".{key}", value) for key, value in list(vars(obj).items()) if key not in _SKIPPED_ATTRIBUTES)
    elif type(obj) is dict:
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
        yield from ((f" key {key!r}", key) for key in obj)
    elif type(obj) in (list, tuple, set, frozenset):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    else:
        yield from _iterate_object_parts(obj)


_SKIPPED_ATTRIBUTES = frozenset({"__dict__", "__weakref__", "__builtins__", "__loader__", "__spec__"})


def _iterate_function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f" (closure variable {name!r})", cell.cell_contents
    for name in sorted(_collect_names(function.__code__)):
        if name in function.__globals__:
            yield f" (global variable {name!r})", function.__globals__[name]
    defaults, positional = function.__defaults__ or (), function.__code__.co_varnames[: function.__code__.co_argcount]
    named = [*zip(positional[len(positional) - len(defaults) :], defaults, strict=True)]
    yield from ((f" (default {name}=)", value) for name, value in [*named, *(function.__kwdefaults__ or {}).items()])
    yield from ((f".{key}", value) for key, value in vars(function).items())


def _collect_names(code: types.CodeType) -> set[str]:
    """Return the names that `code`, and the code nested in it, look up."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_collect_names(inner) for inner in nested))


def _iterate_object_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that the object passes to pickle, which respects a __getstate__."""
    # silent: if this fails, the object itself can't be sent, and the caller has its error
    reduced = run_guarded(lambda: obj.__reduce_ex__(PICKLE_PROTOCOL), lambda _: None)
    if not isinstance(reduced, tuple):
        return
    _, args, state, items, pairs = (*reduced, None, None, None, None)[:5]
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from _iterate_attributes(part)
        elif part is not None:
            yield " (its state)", part
    yield from ((f"[{index}]", value) for index, value in enumerate(items or ()))
    yield from ((f"[{key!r}]", value) for key, value in pairs or ())
    for index, value in enumerate(args or ()):
        yield (".__class__" if value is type(obj) else f" (argument {index} of its reduce)"), value


def _iterate_attributes(state: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield attributes by name; a module's children, parameters and buffers as the user reaches them."""
    for key, value in state.items():
        if key in ("_modules", "_parameters", "_buffers") and isinstance(value, dict):
            yield from ((f"[{name}]" if name.isdigit() else f".{name}", part) for name, part in value.items())
        else:
            yield f".{key}", value

"""Errors of bad arguments: the name that was meant, and the caller's line instead of dtkit's."""

from __future__ import annotations

import difflib
import functools
import inspect
import linecache
import traceback
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from dtkit._util.installation import PACKAGE_FOLDER
from dtkit._util.notebook import render_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_OTHER_NAMES = {  # other libraries' names of arguments
    "criterion": "loss",
    "learning_rate": "lr",
    "loss_fn": "loss",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "optim": "optimizer",
    "scheduler": "lr_scheduler",
    "val_data": "validation",
    "validation_data": "validation",
    "workers": "num_workers",
}
_ROW_WEIGHTS = (
    "rows have no weights here, but a torch loss may return a pair: the sum of weighted losses, and of weights"
)
_MISSING = {"class_weight": _ROW_WEIGHTS, "sample_weight": _ROW_WEIGHTS}
"""Arguments of other libraries that have no counterpart, with what to do."""
_STRATEGY_OPTIONS = ("accumulate", "clip_grad_norm", "compile", "compress", "precision")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def suggest_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method so that the error for an unknown keyword argument names the one that was probably meant.

    Notebooks show that error, and others that dtkit raises for bad arguments, without dtkit's own frames.
    """
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name != "self"]
    required = {name: place for place, name in enumerate(parameters) if _is_required(parameters[name])}
    positional = [name for name in parameters if parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    takes_any_number = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())

    @functools.wraps(function)
    @hide_own_frames
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _refuse_unknown(kwargs.keys() - set(names), names, _describe_call(function, args))
        if len(args) > len(positional) and not takes_any_number:
            _refuse_positional(args, positional, list(parameters), _describe_call(function, args))
        missing = [name for name, place in required.items() if place >= len(args) and name not in kwargs]
        if missing:
            _refuse_missing(missing, [name for name in required if name != "self"], _describe_call(function, args))
        return function(*args, **kwargs)

    return call


def hide_own_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method so that notebooks show its errors for bad arguments without dtkit's own frames."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, FileNotFoundError) as error:
            _hide_own_frames(error)
            raise

    return call


def hide_frames_of_methods(cls: type[_T]) -> type[_T]:
    """Decorate a class so that its public methods show errors for bad arguments without dtkit's own frames."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, hide_own_frames(method))
    return cls


def suggest_options(cls: type[_T]) -> type[_T]:
    """Decorate a dataclass so that the error for an unknown option names the one that was probably meant."""
    cls.__init__ = suggest_arguments(cls.__init__)  # type: ignore[method-assign]  # the one that dataclass has made
    return cls


def _refuse_unknown(unknown: Iterable[str], names: Sequence[str], call: str) -> None:
    for name in unknown:
        other = _OTHER_NAMES.get(name)
        similar = [other] if other in names else difflib.get_close_matches(name, names, n=1)
        if name in _STRATEGY_OPTIONS and "strategy" in names:
            hint = f"it is an option of the strategy, as in strategy=dtkit.DataParallel({name}=...)"
            raise TypeError(f"{call}() has no argument {name}=; {hint}")
        takes = f"it takes {', '.join(names)}" if names else "it takes none"
        hint = f"did you mean {similar[0]}=?" if similar else takes
        raise TypeError(f"{call}() has no argument {name}=; {_MISSING.get(name, hint) if 'loss' in names else hint}")


def _refuse_positional(args: Sequence[object], positional: Sequence[str], names: Sequence[str], call: str) -> None:
    """Refuse arguments without a name beyond those that may have none. Such arrays are mostly parts of the data."""
    extra, taken = args[len(positional)], [name for name in positional if name != "self"]
    others = [name for name in names if name not in positional]
    example = call[0].lower() + call[1:] if "." in call else call  # cluster.train, as users write it
    is_array = hasattr(extra, "__array__")
    if is_array and taken[-1:] == ["data"] and hasattr(args[len(positional) - 1], "__array__"):
        remedy = f"give data as one tuple: {example}({', '.join([*taken[:-1], '(X, y)'])}, ...)"
    elif "sample" in others and (is_array or isinstance(extra, (tuple, dict))):
        needed = "batch_size=..., sample=(X, y)" if "batch_size" in others else "sample=(X, y)"
        remedy = f"give data as sample: {example}({', '.join(taken)}, {needed}, ...)"
    elif others:
        remedy = f"give it by name, as in {others[0]}=...; help(dtkit.{call}) lists the names"
    else:
        remedy = "leave it out"
    allowed = f"only {' and '.join(taken)} without a name" if taken else "no argument without a name"
    shape = f" of shape {tuple(getattr(extra, 'shape', ()))}" if is_array else ""
    kind = f"the {type(extra).__name__}{shape}"
    raise TypeError(f"{call}() takes {allowed}, and got {kind} as argument {len(taken) + 1}; {remedy}")


def _is_required(parameter: inspect.Parameter) -> bool:
    is_named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return is_named and parameter.default is inspect.Parameter.empty


def _refuse_missing(missing: Sequence[str], required: Sequence[str], call: str) -> None:
    verb = "is" if len(missing) == 1 else "are"
    raise TypeError(
        f"{call}() needs {', '.join(required)}; {' and '.join(missing)} {verb} missing. help(dtkit.{call}) lists what "
        "each may be"
    )


def _hide_own_frames(error: Exception) -> None:
    """Have the error shown without dtkit's frames, if a check of dtkit raised it, and no mistake within dtkit."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(innermost.filename, innermost.lineno or 0)
    if _is_own(innermost.filename) and line.lstrip().startswith("raise "):
        error._render_traceback_ = functools.partial(render_traceback, error, is_hidden=_is_own)  # type: ignore[attr-defined]  # IPython's protocol


def _is_own(file: str) -> bool:
    return file.startswith(str(PACKAGE_FOLDER))


def _describe_call(function: Callable[..., object], args: Sequence[object]) -> str:
    """Return a function's name as users write it."""
    if "." not in function.__qualname__:
        return function.__name__
    owner = type(args[0]).__name__ if args else "Cluster"
    return owner if function.__name__ == "__init__" else f"{owner}.{function.__name__}"

"""Errors of bad arguments: the name that was meant, and the caller's line instead of dtkit's."""

from __future__ import annotations

import difflib
import functools
import inspect
import linecache
import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from dtkit._util.completion import get_hidden_names
from dtkit._util.installation import PACKAGE_FOLDER
from dtkit._util.notebook import render_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_OTHER_NAMES = {  # other libraries' names of arguments
    "accumulate_grad_batches": "accumulate",
    "clip": "clip_grad_norm",
    "criterion": "loss",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clip_val": "clip_grad_norm",
    "learning_rate": "lr",
    "loss_fn": "loss",
    "max_epochs": "epochs",
    "max_grad_norm": "clip_grad_norm",
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
_CALL_EXAMPLES = {
    "Pipeline": "Pipeline(stages=2, micro_batches=8)",
    "SSH": 'SSH(["gpu1", "gpu2"])',
    "Schedule": 'Schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"])',
    "TensorParallel": "TensorParallel(2)",
}
"""Calls of classes whose first arguments are required."""
_OPTIMIZER_OPTIONS = ("betas", "learning_rate", "lr", "momentum", "weight_decay")
_STRATEGY_OPTIONS = ("accumulate", "clip_grad_norm", "compile", "compress", "precision")

_P_OR_K, _POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
_NAMED = (_P_OR_K, inspect.Parameter.KEYWORD_ONLY)
_OWNERS = ("self", "cls")
_MARK = "explains_arguments"
"""Attribute of functions that :func:`suggest_arguments` has decorated."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def suggest_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that errors for unknown, missing or further arguments name what was probably meant.

    Notebooks show these errors, and others that dtkit raises for bad arguments, without dtkit's own frames. A
    `timeout` is checked, too.
    """
    if hasattr(function, _MARK):
        return function
    expected = _Parameters(function)

    @functools.wraps(function)
    @hide_own_frames
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if kwargs or not expected.fewest <= len(args) <= expected.most:
            expected.check(args, kwargs)
        return function(*args, **kwargs)

    setattr(call, _MARK, True)
    return call


class _Parameters:
    """Parameters of a function, which a call's arguments must match.

    A call needs no check if it has arguments by place alone, from `fewest` to `most`. Views make many of these.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        parameters = inspect.signature(function).parameters
        self._function = function
        self._names = [name for name in parameters if _has_kind(parameters[name], *_NAMED) and name not in _OWNERS]
        self._required = {name: place for place, name in enumerate(parameters) if _is_required(parameters[name])}
        self._positional = [name for name in parameters if _has_kind(parameters[name], _P_OR_K, _POSITIONAL_ONLY)]
        self._takes_any_number = any(_has_kind(p, inspect.Parameter.VAR_POSITIONAL) for p in parameters.values())
        self._takes_any_name = any(_has_kind(p, inspect.Parameter.VAR_KEYWORD) for p in parameters.values())
        self._timeout_place = list(parameters).index("timeout") if "timeout" in parameters else None
        self.fewest = 1 + max(self._required.values(), default=-1)
        self.most = sys.maxsize if self._takes_any_number else len(self._positional)
        if self._timeout_place is not None and "timeout" in self._positional:
            self.most = min(self.most, self._timeout_place)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError for arguments that the function does not take, or a timeout that is no number."""
        function, positional = self._function, self._positional
        if not self._takes_any_name:
            _refuse_unknown(kwargs.keys() - set(self._names), self._names, _describe_call(function, args))
        if len(args) > len(positional) and not self._takes_any_number:
            _refuse_positional(args, positional, self._names, _describe_call(function, args))
        missing = [name for name, place in self._required.items() if place >= len(args) and name not in kwargs]
        if missing:
            others = [name for name in self._required if name not in _OWNERS]
            _refuse_missing(missing, others, _describe_call(function, args))
        for name in kwargs.keys() & set(positional[: len(args)]):
            raise TypeError(f"{_describe_call(function, args)}() got {name} twice, once by its name; give it once")
        if self._timeout_place is not None:
            is_given_by_place = "timeout" in positional and self._timeout_place < len(args)
            _check_timeout(args[self._timeout_place] if is_given_by_place else kwargs.get("timeout"))


def hide_own_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that notebooks show its errors for bad arguments without dtkit's own frames."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, LookupError, OSError, ImportError, RuntimeError) as error:
            _hide_own_frames(error)
            raise

    return call


def explain_arguments(cls: type[_T]) -> type[_T]:
    """Decorate a class so that its public methods explain bad arguments as :func:`suggest_arguments` does.

    Methods that are hidden from completion are dtkit's own. Views call them so often that no check is made.
    """
    for name, method in list(vars(cls).items()):
        if name.startswith("_") or name in get_hidden_names(cls):
            continue
        if isinstance(method, classmethod):
            setattr(cls, name, classmethod(suggest_arguments(method.__func__)))
        elif inspect.isfunction(method) and method.__name__ == name:  # not a field whose default is a function
            setattr(cls, name, suggest_arguments(method))
    return cls


def suggest_options(cls: type[_T]) -> type[_T]:
    """Decorate a class so that the error for an unknown option names the one that was probably meant.

    ``help(cls.__init__)`` has the class's text, which describes the options.
    """
    init = cls.__init__  # the one that dataclass has made
    if init.__code__.co_filename == "<string>":  # generated, and no frame that a user could look at
        init.__code__ = init.__code__.replace(co_filename=__file__)
    cls.__init__ = suggest_arguments(init)  # type: ignore[method-assign]
    cls.__init__.__doc__ = init.__doc__ or cls.__doc__
    return cls


def _refuse_unknown(unknown: Iterable[str], names: Sequence[str], call: str) -> None:
    """Raise TypeError with a line for each unknown name. Those with the same hint share one."""
    names_by_hint: dict[str, list[str]] = {}
    for name in sorted(unknown):
        names_by_hint.setdefault(_suggest_name(name, names), []).append(f"{name}=")
    if names_by_hint:
        lines = [f"{call}() has no argument {_join(of_hint)}; {hint}" for hint, of_hint in names_by_hint.items()]
        raise TypeError("\n".join(lines))


def _suggest_name(name: str, names: Sequence[str]) -> str:
    """Return what an unknown argument probably meant, or all that the call takes."""
    other = _OTHER_NAMES.get(name)
    for owner, option in _list_owners(name, other):
        if owner in names:
            return f"it is an option of the {owner}, as in {_EXAMPLES[owner].format(option)}"
    if name in _MISSING and "loss" in names:
        return _MISSING[name]
    similar = [other] if other in names else difflib.get_close_matches(name, names, n=1)
    if similar:
        return f"did you mean {similar[0]}=?"
    return f"it takes {', '.join(names)}" if names else "it takes none"


_EXAMPLES = {
    "optimizer": "optimizer=lambda params: torch.optim.SGD(params, {}=...)",
    "strategy": "strategy=dtkit.DataParallel({}=...)",
}


def _list_owners(*names: str | None) -> list[tuple[str, str]]:
    """Return (argument, option) for each of the names that is an option of what another argument takes."""
    options = {"optimizer": _OPTIMIZER_OPTIONS, "strategy": _STRATEGY_OPTIONS}
    return [(owner, name) for name in reversed(names) for owner in options if name in options[owner]]


def _refuse_positional(args: Sequence[object], positional: Sequence[str], names: Sequence[str], call: str) -> None:
    """Refuse arguments without a name beyond those that may have none. Such arrays are mostly parts of the data."""
    extra, taken = args[len(positional)], [name for name in positional if name not in _OWNERS]
    others = [name for name in names if name not in positional]
    example = call[0].lower() + call[1:] if "." in call else call  # cluster.train, as users write it
    is_array = hasattr(extra, "__array__")
    if is_array and taken[-1:] == ["data"] and hasattr(args[len(positional) - 1], "__array__"):
        remedy = f"give data as one tuple: {example}({', '.join([*taken[:-1], '(X, y)'])}, ...)"
    elif others:
        remedy = f"give it by name, as in {others[0]}=...{_name_help(call, '; ', ' lists the names')}"
    else:
        remedy = "leave it out"
    allowed = f"only {' and '.join(taken)} without a name" if taken else "no argument without a name"
    shape = f" of shape {tuple(getattr(extra, 'shape', ()))}" if is_array else ""
    kind = f"the {type(extra).__name__}{shape}"
    raise TypeError(f"{call}() takes {allowed}, and got {kind} as argument {len(taken) + 1}; {remedy}")


def _has_kind(parameter: inspect.Parameter, *kinds: object) -> bool:
    return parameter.kind in kinds


def _is_required(parameter: inspect.Parameter) -> bool:
    return _has_kind(parameter, *_NAMED, _POSITIONAL_ONLY) and parameter.default is inspect.Parameter.empty


def _check_timeout(value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value)):
        raise TypeError(f"timeout={value!r}; it must be a number of seconds, or None for the default")


def check_path(value: object) -> None:
    """Raise TypeError for a `path` that is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"path={value!r}; it must be a text such as 'folder/file', or a pathlib.Path")


def check_no_folder(call: str, path: str | os.PathLike[str]) -> None:
    """Raise IsADirectoryError if a file's `path` is a folder."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{call}({str(path)!r}): this is a folder; name a file in it")


def _name_help(call: str, start: str, end: str) -> str:
    """Return how to get help for a call of dtkit; "" for a class that has no public name."""
    is_public = call.partition(".")[0] in sys.modules["dtkit"].__all__
    return f"{start}help(dtkit.{call}){end}" if is_public else ""


def _refuse_missing(missing: Sequence[str], required: Sequence[str], call: str) -> None:
    verb = "is" if len(missing) == 1 else "are"
    example = f", as in dtkit.{_CALL_EXAMPLES[call]}" if call in _CALL_EXAMPLES else ""
    raise TypeError(
        f"{call}() needs {', '.join(required)}; {_join(missing)} {verb} missing{example}"
        f"{_name_help(call, '. ', ' lists what each may be')}"
    )


def _join(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


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
    first = args[0] if args else None
    # the name of the notebook's object, whatever the base that has the method
    owner = first.__name__ if isinstance(first, type) else type(first).__name__ if args else "Cluster"
    return owner if function.__name__ == "__init__" else f"{owner}.{function.__name__}"

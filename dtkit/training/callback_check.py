"""Checks of callbacks before a training: that each has a method which is called, and takes what it is called with."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dtkit._util.formatting import name_type
from dtkit._util.function_checks import check_method_takes, check_takes
from dtkit._util.metric_collections import split_collections
from dtkit._util.stacklevel import find_caller_stacklevel
from dtkit.training.callbacks import EarlyStopping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.training.config import TrainConfig

_METHODS = {"on_start": ("run",), "on_step": ("run", "step")}
"""What is called on a callback in the notebook, besides itself after every epoch, and with what."""
_ENGINE_METHODS = {"start": ("context",), "after_step": ("context",), "list_tensors": (), "state_dict": ()}
_ENGINE_METHODS["load_state_dict"] = ("state",)
_OTHER_NAMES = {  # other libraries' names of methods
    "on_batch_end": "on_step",
    "on_epoch": "__call__",
    "on_epoch_end": "__call__",
    "on_fit_start": "on_start",
    "on_step_end": "on_step",
    "on_train_batch_end": "on_step",
    "on_train_begin": "on_start",
    "on_train_epoch_end": "__call__",
    "on_train_start": "on_start",
}


def check_callbacks(config: TrainConfig) -> None:
    """Check the argument `callbacks`: a list of functions of the run, and of objects with methods that are called."""
    if callable(config.callbacks) or not hasattr(config.callbacks, "__iter__"):
        is_function = inspect.isroutine(config.callbacks)
        kind = "a function" if is_function else name_type(config.callbacks)
        is_object = callable(config.callbacks) and not is_function
        example = f"{type(config.callbacks).__name__}(...)" if is_object else "function"
        raise TypeError(f"callbacks is {kind}; give a list, also of one: callbacks=[{example}]")
    for place, callback in enumerate(config.callbacks):
        if isinstance(callback, type):
            name = callback.__name__
            raise TypeError(f"callbacks has the class {name}; give an instance: callbacks=[{name}(...)]")
        if not (callable(callback) or hasattr(callback, "on_step") or hasattr(callback, "on_start")):
            raise TypeError(
                f"callbacks has {callback!r}; each must be a function of the run, called after every epoch, such as "
                "dtkit.EarlyStopping(patience=3), or an object with a method on_step(run, step) or on_start(run)"
                f"{_suggest_method(callback, '. ')}"
            )
        _check_methods(f"callbacks[{place}]", callback)
        if isinstance(callback, EarlyStopping):
            callback.check_monitor(
                _list_metric_names(config),
                has_validation=config.validation is not None,
                logs_further=hasattr(config.training_step, "evaluate"),
            )


def _list_metric_names(config: TrainConfig) -> list[str]:
    """Return the names of all values of an evaluation, besides the loss. One metric of a library may have several."""
    names: list[str] = []
    for name, metric in split_collections(config.metrics or {}).items():
        names += metric.list_names() if hasattr(metric, "list_names") else [name]  # of Keras
    return names


def check_on_engine(callbacks: Sequence[Any]) -> None:
    """Check the argument `on_engine`: a list of dtkit's callbacks on engines."""
    if not callbacks:
        return
    from dtkit.engine.callbacks import EngineCallback

    if not isinstance(callbacks, Iterable):
        raise TypeError(f"on_engine is {name_type(callbacks)}; give a list, as in on_engine=[callback]")
    for callback in callbacks:
        if not isinstance(callback, EngineCallback):
            raise TypeError(
                f"on_engine has {callback!r}; each must be a dtkit.EngineCallback, such as "
                "dtkit.ExponentialMovingAverage(0.999)"
            )
        for name, arguments in _ENGINE_METHODS.items():
            check_method_takes(callback, name, arguments)


def _check_methods(argument: str, callback: Any) -> None:
    """Raise TypeError for a method with other arguments. Warn of one whose name is almost that of a method."""
    for name, arguments in _METHODS.items():
        if hasattr(callback, name):
            check_method_takes(callback, name, arguments)
    if inspect.isroutine(callback):
        check_takes(argument, callback, ("run",))
        return
    if callable(callback):
        check_method_takes(callback, "__call__", ("run",))
    if suggestion := _suggest_method(callback):
        warnings.warn(suggestion, stacklevel=find_caller_stacklevel())


def _suggest_method(callback: Any, start: str = "") -> str:
    """Return which method a callback may have meant by one that is never called; "" if there is none."""
    owner = type(callback)
    defined = {name for each in owner.__mro__ for name in vars(each)}
    for name in sorted(defined - _METHODS.keys()):
        similar = difflib.get_close_matches(name, _METHODS, n=1, cutoff=0.8)
        meant = _OTHER_NAMES.get(name) or (similar[0] if similar else None)
        if name.startswith("on_") and meant is not None and meant not in defined:
            arguments = ", ".join(("self", *_METHODS.get(meant, ("run",))))
            return f"{start}{owner.__name__}.{name} is never called; did you mean def {meant}({arguments})?"
    return ""

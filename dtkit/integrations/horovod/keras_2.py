"""Arguments and attributes that Horovod's scripts for Keras 2 use, and that Keras 3 no longer has."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from collections.abc import Callable


def accept_dropped_arguments() -> None:
    """Let Keras 3 accept what Horovod's examples and documentation have from Keras 2.

    `compile` ignores `experimental_run_tf_function`, which switched off a way of running that Keras no longer has.
    Unless the script asks for XLA, `compile` doesn't use it with Horovod's optimizers. Optimizers take `lr`, and have
    an attribute of this name, for which `tf.keras.backend.set_value` works. Only a script's own process calls this
    function.
    """
    _change_options(keras.Model, "compile", _change_compile)
    _change_options(keras.optimizers.Optimizer, "__init__", _rename_lr)
    if not hasattr(keras.optimizers.Optimizer, "lr"):
        keras.optimizers.Optimizer.lr = property(_get_rate, _set_rate)
    if keras.backend.backend() == "tensorflow":
        tensorflow = importlib.import_module("tensorflow")
        tensorflow.keras.backend.set_value = _set_value  # Keras 3's own one fails for Keras 3's variables


def _change_options(kind: Any, name: str, change: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
    """Let a method change its keyword arguments before it runs."""
    owner: Any = next(base for base in kind.__mro__ if name in vars(base))  # Keras compares with this class
    method = getattr(owner, name)
    if method.__name__ == "call_changed":
        return

    @functools.wraps(method, assigned=("__doc__",))
    def call_changed(self: Any, *args: Any, **options: Any) -> Any:
        change(args, options)
        return method(self, *args, **options)

    setattr(owner, name, call_changed)


def _change_compile(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    options.pop("experimental_run_tf_function", None)
    if hasattr(args[0] if args else options.get("optimizer"), "register_local_var"):  # only Horovod's have it
        options.setdefault("jit_compile", False)


def _rename_lr(_args: tuple[Any, ...], options: dict[str, Any]) -> None:
    if "lr" in options:
        options["learning_rate"] = options.pop("lr")


def _set_value(variable: Any, value: Any) -> None:
    variable.assign(value)


def _get_rate(optimizer: Any) -> Any:
    return optimizer.learning_rate


def _set_rate(optimizer: Any, rate: Any) -> None:
    optimizer.learning_rate = rate

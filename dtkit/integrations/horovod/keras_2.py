"""Arguments that Horovod's scripts for Keras 2 pass, and that Keras 3 no longer accepts."""

from __future__ import annotations

import functools
from typing import Any

import keras


def accept_dropped_arguments() -> None:
    """Let `compile` accept `experimental_run_tf_function`, which Horovod's documentation asked for.

    It switched off a way of running that Keras no longer has. Only a script's own process calls this function.
    """
    owner: Any = next(base for base in keras.Model.__mro__ if "compile" in vars(base))  # Keras compares with this class
    compile_model = owner.compile
    if compile_model.__name__ == "accept_dropped":
        return

    @functools.wraps(compile_model, assigned=("__doc__",))
    def accept_dropped(self: Any, *args: Any, **options: Any) -> Any:
        options.pop("experimental_run_tf_function", None)
        return compile_model(self, *args, **options)

    owner.compile = accept_dropped

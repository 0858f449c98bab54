"""Compile the calls of a model, of any class.

``model.compile()`` compiles nothing for classes of ``torch.nn``. torch 2.13 traces no frame of its own files, and a
bare ``nn.Sequential`` has no other frames. A call through a function of dtkit is traced, with everything it calls.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.torch_private import COMPILED_CALL, call_uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.strategies.loss import Loss

COMPILE_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of ``torch.compile``. The first one records CUDA graphs; so does the second one, which tries many kernels."""


class CompiledModel:
    """The compiled call of a model. Copies of the model are not compiled, as with ``model.compile()``."""

    def __init__(self, model: torch.nn.Module, mode: str | None = None) -> None:
        """Compile with one of `COMPILE_MODES`, or as torch does by default."""
        self._is_called = False
        vars(model)[COMPILED_CALL] = self._count_call(torch.compile(_make_call(model), mode=mode))

    def check_steps(self, loss_fn: Loss) -> Loss:
        """Return the loss with a training step that raises ValueError if it doesn't call the model."""
        original = loss_fn.training_step
        if original is None:
            return loss_fn

        @functools.wraps(original)
        def training_step(*args: Any) -> Any:
            result = original(*args)
            if self._is_called:
                return result
            raise ValueError(
                "compile=True compiles what model(...) computes, but training_step calls only parts or methods of the "
                "model, so nothing would be compiled. Call model(...) in training_step, or leave out compile=True"
            )

        return dataclasses.replace(loss_fn, training_step=training_step)

    def _count_call(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._is_called = True
            return compiled(*args, **kwargs)

        return call


def _make_call(model: torch.nn.Module) -> Callable[..., Any]:
    def call_model(*args: Any, **kwargs: Any) -> Any:
        return call_uncompiled(model, *args, **kwargs)

    return call_model

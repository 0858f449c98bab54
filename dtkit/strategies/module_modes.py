"""Training and evaluation mode of a model's modules.

The user may have put a module into evaluation, such as a frozen backbone with dropout or batch statistics. It stays
there while the rest of the model trains. A model that is in evaluation as a whole, as ``from_pretrained`` returns it,
trains in training mode.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_Model = TypeVar("_Model", bound=torch.nn.Module)


def enter_training(model: _Model) -> _Model:
    """Put a model into training mode, and return it. Does nothing to the parts of a model that is in training."""
    return model if model.training else model.train()


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and afterwards each module back into its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def module_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, and afterwards each module back into its own mode."""
    with evaluation_mode(model), torch.no_grad():
        yield

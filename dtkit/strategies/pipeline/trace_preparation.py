"""Changes of a model's copy that let torch's exporter trace it, without changing its results."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.torch_private import tree_map
from dtkit.strategies.kv_cache import disable_kv_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def prepare_for_trace(model: nn.Module) -> None:
    """Change a copy of a user's model.

    A model of Hugging Face returns no cache of keys and values. A module whose forward is decorated with
    `torch.no_grad` detaches its output instead. The exporter's form of that context can't be cut (rotary embeddings
    have it).
    """
    disable_kv_cache(model)
    for module in model.modules():
        if (function := _find_function_without_grad(type(module).forward)) is not None:
            module.forward = functools.partial(_call_and_detach, functools.partial(function, module))


def _find_function_without_grad(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function that `torch.no_grad` decorates; None for any other one."""
    cells = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    is_without_grad = isinstance(getattr(cells.get("ctx_factory"), "__self__", None), torch.no_grad)
    return getattr(forward, "__wrapped__", None) if is_without_grad else None


def _call_and_detach(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = function(*args, **kwargs)
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)

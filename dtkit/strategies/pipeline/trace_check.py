"""Check that a trace of a model computes what the model does: torch's exporter records tensor operations alone.

It evaluates Python once, so numbers from ``random`` or numpy and counters in attributes would stay as they were. It
records no backward pass, so a custom ``autograd.Function`` and hooks on gradients would be lost. The forward pass runs
here as the trace sees it, on tensors without values.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.function import BackwardCFunction

from dtkit._util.torch_private import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

_EXACT_FUNCTIONS = ("CheckpointFunctionBackward",)
"""Functions whose backward is the derivative of what the trace records."""


def run_checked(model: nn.Module, forward: Callable[[nn.Module], Any]) -> Any:
    """Return the result of a forward pass; raise ValueError if a trace of it would compute something else."""
    drawn, numbers = _get_random_states(), _list_numbers(model)
    with torch.enable_grad(), _record_hooks() as hooks:
        output = forward(model)
    draws = _describe_draws(drawn)
    if draws:
        raise ValueError(f"its forward draws numbers from {draws}, and a trace would repeat the first draw")
    changed = _list_numbers(model)
    if changed != numbers:  # by a counter, or once by a cache
        forward(model)
        counters = [name for name, value in _list_numbers(model).items() if changed.get(name, value) != value]
        if counters:
            raise ValueError(f"its forward changes {counters[0]}, a number that a trace would not change")
    functions = [name for name in _list_custom_functions(output) if name not in _EXACT_FUNCTIONS]
    if functions or hooks:
        lost = functions[0] if functions else "hooks on gradients (register_hook)"
        raise ValueError(f"its backward pass has {lost}, and a trace would lose it")
    return output


@contextlib.contextmanager
def _record_hooks() -> Iterator[list[str]]:
    """Collect the hooks that are registered on tensors within the context, instead of registering them."""
    hooks: list[str] = []
    original = torch.Tensor.register_hook
    setattr(torch.Tensor, "register_hook", lambda _tensor, hook: hooks.append(repr(hook)))  # noqa: B010 - for mypy
    try:
        yield hooks
    finally:
        setattr(torch.Tensor, "register_hook", original)  # noqa: B010 - as above


def _get_random_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that users' code may change


def _describe_draws(before: tuple[Any, Any]) -> str:
    """Return which generator has been used, and restore its state."""
    now = _get_random_states()
    if now[0] != before[0]:
        random.setstate(before[0])
        return "random"
    if any(not np.array_equal(a, b) for a, b in zip(now[1], before[1], strict=True)):
        np.random.set_state(before[1])  # noqa: NPY002 - as above
        return "numpy.random"
    return ""


def _list_numbers(model: nn.Module) -> dict[str, float]:
    """Return the numbers among the attributes of a model's modules."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float)
    }


def _list_custom_functions(output: Any) -> list[str]:
    """Return the names of Python functions among those that a backward pass of this output would call."""
    waiting: list[Any] = [
        t.grad_fn for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None
    ]
    seen, names = set(waiting), []
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            names.append(type(node).__name__)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return names

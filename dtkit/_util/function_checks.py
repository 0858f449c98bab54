"""Checks of the user's functions by their parameters: whether they take what the engines will call them with."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dtkit._util.formatting import name_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def check_metrics(metrics: Any) -> Mapping[str, Callable[..., Any]]:
    """Return metrics by name. Raise TypeError or ValueError for anything else."""
    if metrics is None:
        return {}
    if not hasattr(metrics, "items"):
        raise TypeError(
            f"metrics is {name_type(metrics)}; give names and functions of (output, target), as in "
            "metrics={'accuracy': accuracy}"
        )
    if "loss" in metrics:
        raise ValueError("metrics has 'loss', which is the name of the loss itself; give the metric another name")
    for name, metric in metrics.items():
        if not callable(metric):
            raise TypeError(f"metrics[{name!r}] is {name_type(metric)}; it must be a function of (output, target)")
        check_takes(f"metrics[{name!r}]", metric, ("output", "target"))
    named: Mapping[str, Callable[..., Any]] = metrics
    return named


def check_loss_functions(loss: Callable[..., Any] | None, training_step: Callable[..., Any] | None) -> None:
    """Raise TypeError unless a loss takes (output, target), and a step (model, batch), or the optimizers too."""
    if loss is not None:
        check_takes("loss", loss, ("output", "target"))
    names = ("model", "batch")
    if training_step is not None and not _takes(training_step, (*names, "optimizers")):
        check_takes("training_step", training_step, names)


def check_takes(argument: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise TypeError unless a function can be called with arguments of these names, without their names."""
    if _takes(function, names):
        return
    own_name = getattr(function, "__name__", type(function).__name__)
    is_lambda = own_name == "<lambda>"
    shown = "lambda" if is_lambda else own_name
    listed = ", ".join(names)
    remedy = f"{argument}=lambda {listed}: ..." if is_lambda else f"def {own_name}({listed})"
    raise TypeError(
        f"{argument}={shown} takes {_describe_parameters(function)}, and dtkit calls it with ({listed}). Write it as "
        f"{remedy}"
    )


def check_method_takes(owner: Any, name: str, names: Sequence[str]) -> None:
    """Raise TypeError unless the method of this name can be called with arguments of these names, without them."""
    method = getattr(owner, name)
    if not _takes(method, names):
        raise TypeError(
            f"{type(owner).__name__}.{name} takes {_describe_parameters(method)}, and dtkit calls it with "
            f"({', '.join(names)}). Write it as def {name}({', '.join(('self', *names))})"
        )


def _takes(function: Callable[..., Any], names: Sequence[str]) -> bool:
    """Return whether a function takes these arguments, or can't tell."""
    try:
        signature = inspect.signature(getattr(function, "forward", function))  # a module's __call__ takes anything
    except (ValueError, TypeError):  # written in C
        return True
    try:
        signature.bind(*names)
    except TypeError:
        return False
    return True


def _describe_parameters(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    return f"({', '.join(p.name for p in parameters)})" if parameters else "no argument"

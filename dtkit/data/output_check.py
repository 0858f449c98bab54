"""A check of what a loss gets: some losses of torch contain a softmax or a sigmoid, which a model must then leave out.

torch computes such a loss without an error. With a second softmax a training is slow and its loss stays high; with
probabilities in place of their logarithms it has no meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dtkit.strategies.module_modes import module_eval_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.strategies.loss import Loss

_SUM_TOLERANCE = 1e-4
_SHAPING = ("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "Clone")
"""Operations that only choose or arrange numbers, as torch names their gradients."""


def describe_activated_output(loss: Loss, model: torch.nn.Module, batch: Any) -> str | None:
    """Return a warning if a loss of torch gets probabilities or targets that it is not made for. Runs the model."""
    with module_eval_mode(model), torch.enable_grad(), _LossInputs() as inputs:
        loss(model, batch)
    return next(iter(inputs.warnings), None)


class _LossInputs(TorchFunctionMode):
    """Mode that looks at the outputs that torch's losses get, also within the user's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        describe = _CHECKS.get(func)
        if describe is not None:
            output = args[0] if args else kwargs.get("input")
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
                self.warnings += filter(None, [describe(output, target)])
        return func(*args, **kwargs)


def _describe_second_softmax(output: torch.Tensor, _target: torch.Tensor) -> str | None:
    if not _are_probabilities(output):
        return None
    return (
        "the model's outputs for a sample are probabilities: they sum to 1. CrossEntropyLoss takes their softmax once "
        "more, so the training is slow and the loss stays high. Leave the softmax out of the model, and apply it to "
        "outputs where you need probabilities"
    )


def _describe_missing_logarithm(output: torch.Tensor, _target: torch.Tensor) -> str | None:
    if not _are_probabilities(output):
        return _describe_logits(output)
    return (
        "the model's outputs for a sample are probabilities: they sum to 1. NLLLoss needs their logarithms, so this "
        "loss means nothing. Use log_softmax in place of softmax"
    )


def _describe_logits(output: torch.Tensor) -> str | None:
    """Return a warning if outputs are not the logarithms of probabilities, which are never above 0."""
    if output.dim() < 2 or output.shape[1] < 2 or not output.numel() or output.max() <= _SUM_TOLERANCE:
        return None
    return (
        "NLLLoss needs the logarithms of probabilities, which are 0 or less, and the model's outputs go up to "
        f"{float(output.max()):.3g}: this loss has no lower bound. Use CrossEntropyLoss, which takes outputs as they "
        "are, or end the model with nn.LogSoftmax(1)"
    )


def _describe_binary_loss(output: torch.Tensor, target: torch.Tensor) -> str | None:
    if _get_last_operation(output) == "Sigmoid":
        return (
            "the model's outputs have been through a sigmoid. BCEWithLogitsLoss applies it once more, so the training "
            "is slow and the loss stays high. Leave the sigmoid out of the model, and apply it to outputs where you "
            "need probabilities"
        )
    if target.numel() and (target.min() < 0 or target.max() > 1):
        return (
            f"BCEWithLogitsLoss needs targets between 0 and 1, and these lie between {float(target.min()):g} and "
            f"{float(target.max()):g}, so the loss means nothing. For classes, give the model an output for each, and "
            "use CrossEntropyLoss with int64 targets"
        )
    return None


def _are_probabilities(output: torch.Tensor) -> bool:
    """Return whether outputs of shape (samples, classes, ...) are probabilities of at least two classes."""
    if output.dim() < 2 or output.shape[1] < 2 or not output.numel() or bool((output < 0).any()):
        return False
    sums = output.detach().double().sum(1)
    return torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=_SUM_TOLERANCE)


def _get_last_operation(output: torch.Tensor) -> str:
    """Return the name of the operation that computed these numbers, as in "Sigmoid"; empty if unknown."""
    node = output.grad_fn
    while node is not None:
        name = node.name().partition("Backward")[0]
        if name not in _SHAPING:
            return name
        node = node.next_functions[0][0]
    return ""


_CHECKS: dict[Callable[..., Any], Callable[[torch.Tensor, torch.Tensor], str | None]] = {
    functional.cross_entropy: _describe_second_softmax,
    functional.nll_loss: _describe_missing_logarithm,
    functional.binary_cross_entropy_with_logits: _describe_binary_loss,
}

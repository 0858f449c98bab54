"""Check that a sharded model computes the same as the whole one.

Some wrong plans raise no error. A layer with parameters between a colwise and a rowwise one gets only a part of its
gradient. So two rows go forward and backward through the whole and the sharded model before the first step. Output,
loss and the norm of every gradient must agree.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtkit.engine.data.random_state import GeneratorStates, seed_generators
from dtkit.engine.state.dtensor_shards import get_local_tensor
from dtkit.strategies.dtensor_worker import sum_global_squares
from dtkit.strategies.module_backup import undo_module_writes
from dtkit.strategies.module_modes import evaluation_mode
from dtkit.strategies.tensor.layout import gather_full, redistribute_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.strategies.loss import Loss


_CHECK_SEED = 0
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative


@dataclasses.dataclass(frozen=True)
class PlanCheckResult:
    """Outputs, loss and gradients of a model for a small batch."""

    outputs: list[torch.Tensor]
    loss: torch.Tensor
    grad_squares: torch.Tensor
    """Sum of squares of each parameter's gradient."""

    def to(self, device: torch.device) -> PlanCheckResult:
        """Return the same on another device."""
        return PlanCheckResult([t.to(device) for t in self.outputs], self.loss.to(device), self.grad_squares.to(device))


PARTIAL_OUTPUT_ADVICE = (
    "After a colwise layer, each rank has a part of its outputs until a rowwise layer sums them; 'gathered' gives all "
    "outputs. Change the plan, or leave such layers out of it"
)


ELEMENTWISE_ADVICE = (
    "Between a colwise and a rowwise layer, only elementwise operations are allowed: no other parameters, and no sums "
    "over features. Change the plan, or leave such layers out of it"
)


def _find_float_tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for entry in entries for tensor in _find_float_tensors(entry)]


def _compute_relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())  # such as infinities of a mask
    difference = (a - b).abs().masked_fill(same, 0.0).max()
    return float(difference / a.nan_to_num(posinf=0, neginf=0).abs().max().clamp(min=1e-6))


def run_plan_check(
    model: nn.Module, loss_fn: Loss, batch: Any, parameters: Sequence[torch.Tensor], num_holders: Sequence[int]
) -> PlanCheckResult:
    """Run a batch forward and backward, without dropout and without updating batch statistics.

    Random numbers that the model or the loss draws are the same in each run.
    """
    states = GeneratorStates.capture()
    seed_generators(_CHECK_SEED)
    try:  # cudnn can't run recurrent layers backward in evaluation
        with undo_module_writes(model), evaluation_mode(model), torch.backends.cudnn.flags(enabled=False):
            output = loss_fn.evaluate_batch(model, batch)
            loss = gather_full(output.loss)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        states.restore()
    local_gradients = [
        loss.new_zeros(1) if g is None else get_local_tensor(redistribute_gradient(p, g))
        for p, g in zip(parameters, gradients, strict=True)
    ]
    outputs = [t.detach() for t in _find_float_tensors(gather_full(output.output))]
    return PlanCheckResult(
        outputs, loss.detach(), sum_global_squares(local_gradients, num_holders, parameters[0].device)
    )


def describe_difference(before: PlanCheckResult, after: PlanCheckResult, parameter_names: Sequence[str]) -> str:
    """Return which outputs or gradients differ, or an empty string."""
    tolerance = _TOLERANCE.get(before.loss.dtype, 5e-2)
    pairs = [*zip(before.outputs, after.outputs, strict=True), (before.loss, after.loss)]
    if any(a.shape != b.shape or _compute_relative_difference(a, b) > tolerance for a, b in pairs):
        return "its output or loss differs"
    expected, actual = before.grad_squares.sqrt(), after.grad_squares.sqrt()
    differs = (expected - actual).abs() > tolerance * (torch.maximum(expected, actual) + expected.max())
    names = [name for name, is_different in zip(parameter_names, differs.tolist(), strict=True) if is_different]
    return f"the gradients of {', '.join(names)} differ" if names else ""

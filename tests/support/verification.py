"""Verification of a state against a changed copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit.rpc.verification import Verification
from dtkit.training.verify import compare_states

if TYPE_CHECKING:
    from dtkit.rpc.reference import StepTimes


def verify_changed_state(
    change: dict[str, Any] | None = None,
    gradients: dict[str, torch.Tensor] | None = None,
    modules: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> Verification:
    """Compare a state with a copy to which `change` was added."""
    reference = {"w": torch.ones(3, dtype=dtype), "b": torch.ones(2, dtype=dtype), "count": torch.tensor(7)}
    state = {name: value.clone() for name, value in reference.items()}
    for name, by in (change or {}).items():
        state[name] = state[name] + torch.as_tensor(by, dtype=dtype)
    if gradients is None:
        gradients = {"w": torch.ones(3, dtype=dtype), "b": torch.ones(2, dtype=dtype)}
    return compare_states(state, reference, gradients, modules, 20, 2)


def make_verification(step_times: StepTimes | None = None) -> Verification:
    """Return a verification of 20 steps that passed, with two parameters."""
    differences = {"weight": 2.98e-8, "bias": 0.0}
    return Verification("PASS", 20, 2, "float32", 2.98e-8, 1e-5, differences, {}, (), step_times=step_times)

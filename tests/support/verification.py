"""A verification of a state against itself."""

from __future__ import annotations

from typing import Any

import torch

from dtkit.training.verify import Verification, compare_states


def judged(
    change: dict[str, Any] | None = None,
    gradients: dict[str, torch.Tensor] | None = None,
    modules: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> Verification:
    """Compare a state with itself, after adding `build_change` to it."""
    reference = {"w": torch.ones(3, dtype=dtype), "b": torch.ones(2, dtype=dtype), "count": torch.tensor(7)}
    state = {name: value.clone() for name, value in reference.items()}
    for name, by in (change or {}).items():
        state[name] = state[name] + torch.as_tensor(by, dtype=dtype)
    if gradients is None:
        gradients = {"w": torch.ones(3, dtype=dtype), "b": torch.ones(2, dtype=dtype)}
    return compare_states(state, reference, gradients, modules, 20, 2)

"""Range of a model's parameters. It is looked at only after a step that was not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def find_largest_parameter(model: nn.Module) -> float:
    """Return the largest absolute value in this rank's part of the parameters; infinity for NaN, 0 without any."""
    largest = 0.0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.numel() and not local.is_meta:
            value = float(torch.abs(local.detach()).max())
            largest = max(largest, math.inf if math.isnan(value) else value)
    return largest

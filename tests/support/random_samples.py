"""Samples that user code draws at random."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.support import small

if TYPE_CHECKING:
    from collections.abc import Callable

FEATURES = 4
SOLUTION = torch.tensor([[1.0, -2.0, 3.0, 0.5]])


def draw_from_global_generators() -> torch.Tensor:
    """Return the sum of a draw from each generator that a seed covers."""
    from_python = torch.tensor([random.gauss(0, 1) for _ in range(FEATURES)])
    from_numpy = torch.from_numpy(np.random.randn(FEATURES)).float()  # noqa: NPY002 - as users do
    return torch.randn(FEATURES) + from_numpy + from_python


class RandomSamples(Dataset[Any]):
    """Samples at random, whose targets the model of `make_solved_model` predicts without error."""

    def __init__(self, draw: Callable[[], torch.Tensor] | None) -> None:
        self._draw = draw
        self._generator: np.random.Generator | None = None

    def __len__(self) -> int:
        return small.ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._draw_own() if self._draw is None else self._draw()
        return x, SOLUTION @ x

    def _draw_own(self) -> torch.Tensor:
        if self._generator is None:  # each process has other numbers
            self._generator = np.random.default_rng()
        return torch.from_numpy(self._generator.standard_normal(FEATURES)).float()

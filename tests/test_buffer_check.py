"""Buffers that are statistics of a batch, found on a few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtkit.data.buffer_check import describe_batch_statistics
from dtkit.strategies.loss import Loss


class Buffered(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(3, 2)
        self.register_buffer("value", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> Any:
        change = {"mean": x.mean(0), "count": torch.ones(3), "constant": torch.zeros(3)}[self.kind]
        self.value += change
        return self.linear(x)


@pytest.mark.parametrize(("kind", "is_warned_of"), [("mean", True), ("count", False), ("constant", False)])
def test_only_buffers_that_depend_on_rows_are_warned_of(kind: str, *, is_warned_of: bool):
    torch.manual_seed(0)
    batch = torch.randn(8, 3), torch.randn(8, 2)
    warning = describe_batch_statistics(Loss(nn.MSELoss()), Buffered(kind), batch)
    assert (warning is not None) == is_warned_of
    assert not is_warned_of or "the buffer 'value' changes by the rows of a batch" in str(warning)


def test_model_that_refuses_parts_of_a_batch_is_not_warned_of():
    class Fixed(Buffered):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x.view(8, 3))

    batch = torch.randn(8, 3), torch.randn(8, 2)
    assert describe_batch_statistics(Loss(nn.MSELoss()), Fixed("mean"), batch) is None

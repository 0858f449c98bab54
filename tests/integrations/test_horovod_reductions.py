"""Averages and factors of Horovod's reductions, by themselves."""

from __future__ import annotations

import pytest
import torch

from dtkit.integrations.horovod import reductions


@pytest.mark.parametrize(
    ("values", "op", "factor", "expected"),
    [
        ([-3, 3], reductions.Average, 1.0, [-1, 1]),  # integers are truncated, not rounded down
        ([-3, 3], reductions.Sum, 0.5, [-1, 1]),
        ([-3.0, 3.0], reductions.Average, 1.0, [-1.5, 1.5]),
        ([-3.0, 3.0], reductions.Average, 2.0, [-3.0, 3.0]),
        ([-3.0, 3.0], reductions.Max, 1.0, [-3.0, 3.0]),
    ],
)
def test_only_averages_are_divided_and_integers_are_truncated(
    values: list[float], op: int, factor: float, expected: list[float]
):
    tensor = torch.tensor(values)
    reductions.finish(tensor, op, 2, factor)
    assert tensor.tolist() == expected


def test_half_precision_is_scaled_in_single_precision():
    tensor = torch.tensor([60000.0], dtype=torch.float16)
    reductions.scale(tensor, 0.1)
    assert tensor.item() == pytest.approx(6000)
    assert tensor.dtype == torch.float16

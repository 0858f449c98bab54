"""Gradients of small models in one buffer: which models have one, and what their parameters see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtkit.strategies.flat_gradients import MAX_FLAT_BYTES, FlatGradients, fits_flat_buffer


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


def frozen() -> nn.Module:
    model = nn.Linear(2, 2)
    model.requires_grad_(requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(4, 3), True),
        (nn.Linear(MAX_FLAT_BYTES // 4 + 1, 1), False),
        (nn.Embedding(5, 2, sparse=True), False),
        (nn.Embedding(5, 2), True),
        (mixed(), False),
        (frozen(), False),
        (nn.Linear(2, 2, dtype=torch.complex64), False),
    ],
    ids=["small", "large", "sparse", "dense embedding", "two types", "frozen", "complex"],
)
def test_only_small_dense_gradients_of_one_type_have_a_flat_buffer(model, expected):
    assert fits_flat_buffer(model) is expected


def test_collected_gradients_are_views_of_the_buffer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    parameters = list(model.parameters())
    flat = FlatGradients(parameters)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        before = [p.grad.clone() for p in parameters]
        assert not flat.is_current
        buffer = flat.collect()
        assert flat.is_current
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(parameters, before, strict=True))
        buffer.mul_(2)
        assert all(torch.equal(p.grad, 2 * gradient) for p, gradient in zip(parameters, before, strict=True))

"""Gradients of small models in one buffer: which models have one, and what their parameters see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dtkit.strategies.flat_gradients import MAX_FLAT_BYTES, FlatGradients, choose_max_flat_bytes, fits_flat_buffer


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
    assert fits_flat_buffer(model, choose_max_flat_bytes(is_one_host=False)) is expected


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norm_of_copied_gradients_is_that_of_all(dtype: torch.dtype):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    flat = FlatGradients(list(model.parameters()))
    assert not flat.copy()  # no gradients yet
    model(torch.randn(5, 4, dtype=dtype)).square().sum().backward()
    assert flat.copy()
    assert not flat.is_current
    expected = torch.cat([p.grad.double().view(-1) for p in model.parameters()]).norm()
    assert flat.compute_norm() == pytest.approx(float(expected), rel=1e-2 if dtype is torch.bfloat16 else 1e-6)
    model[0].weight.grad.fill_(float("nan"))
    assert flat.copy()
    assert math.isnan(flat.compute_norm())
    model[1].bias.grad = model[1].bias.grad.to_sparse()
    assert not flat.copy()

"""Backward passes that can be split into halves."""

import pytest
import torch
from torch import nn

from dtkit.strategies.pipeline.split_backward import can_split_backward
from tests.support import nets
from tests.support.stage_models import Adapted, Around, Queries, Tied


def can_split(model, *inputs):
    return can_split_backward([model(*inputs)], inputs, model.parameters())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(nets.WIDTH, nets.WIDTH), nn.LayerNorm(nets.WIDTH), nn.ReLU()),
        nn.TransformerEncoderLayer(nets.WIDTH, 2, batch_first=True),
        *(nets.Block(attention) for attention in ("torch", "fused", "by hand")),
    ],
)
def test_common_layers_split_backward(model):
    assert can_split(model, torch.randn(3, nets.FEATURES, nets.WIDTH, requires_grad=True))


@pytest.mark.parametrize("make", [Queries, Tied, Around, Adapted])
def test_weights_whose_paths_meet_do_not_split_backward(make):
    assert not can_split(make(), torch.randn(3, nets.WIDTH, requires_grad=True))


def test_weights_without_an_input_do_not_split_backward():
    layer = nn.Linear(2, 2)
    assert not can_split(layer, torch.randn(3, 2))
    x = torch.randn(3, 2, requires_grad=True)
    assert not can_split_backward([layer(torch.randn(3, 2)), x * 2], [x], layer.parameters())
    assert can_split_backward(
        [layer(x)], [x], [*layer.parameters(), *nn.Linear(2, 2).parameters()]
    )  # unused weights do not matter

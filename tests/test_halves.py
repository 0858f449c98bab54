"""Which stages' backward passes can be taken in halves."""

import pytest
import torch
from torch import nn

from dtkit.strategies.pipeline.split_backward import can_split_backward
from tests.cluster import nets
from tests.cluster.test_borders import Adapted, Around, Queries, Tied


def halves(model, *inputs):
    return can_split_backward([model(*inputs)], inputs, model.parameters())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(nets.WIDTH, nets.WIDTH), nn.LayerNorm(nets.WIDTH), nn.ReLU()),
        nn.TransformerEncoderLayer(nets.WIDTH, 2, batch_first=True),
        *(nets.Block(attention) for attention in ("torch", "fused", "by hand")),
    ],
)
def test_the_usual_layers_come_in_halves(model):
    assert halves(model, torch.randn(3, nets.FEATURES, nets.WIDTH, requires_grad=True))


@pytest.mark.parametrize("make", [Queries, Tied, Around, Adapted])
def test_weights_that_meet_come_at_once(make):
    assert not halves(make(), torch.randn(3, nets.WIDTH, requires_grad=True))


def test_weights_behind_no_input_come_at_once():
    layer = nn.Linear(2, 2)
    assert not halves(layer, torch.randn(3, 2))
    x = torch.randn(3, 2, requires_grad=True)
    assert not can_split_backward([layer(torch.randn(3, 2)), x * 2], [x], layer.parameters())
    assert can_split_backward(
        [layer(x)], [x], [*layer.parameters(), *nn.Linear(2, 2).parameters()]
    )  # others have no part in it

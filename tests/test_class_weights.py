"""torch's losses with class weights, as pairs of a sum and a weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit.errors import FirstBatchError
from dtkit.strategies.class_weights import ClassWeightedLoss, convert_class_weights
from dtkit.testing.fake_transport import FakeTransport
from tests.support.small import train

GENERATOR = torch.Generator().manual_seed(0)
OUTPUT = torch.randn(8, 3, generator=GENERATOR, dtype=torch.float64)
IMAGES = torch.randn(8, 3, 4, 5, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, -100])
PIXELS = torch.randint(3, (8, 4, 5), generator=GENERATOR)
WEIGHT = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "output", "target"),
    [
        (nn.CrossEntropyLoss(WEIGHT), OUTPUT, LABELS),
        (nn.CrossEntropyLoss(WEIGHT, ignore_index=1), OUTPUT[:7], LABELS[:7]),
        (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2), OUTPUT, LABELS),
        (nn.CrossEntropyLoss(WEIGHT, ignore_index=0, label_smoothing=0.2), IMAGES, PIXELS),
        (nn.CrossEntropyLoss(WEIGHT), OUTPUT, OUTPUT.softmax(1)),
        (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2), IMAGES, IMAGES.softmax(1)),
        (nn.NLLLoss(WEIGHT), OUTPUT.log_softmax(1), LABELS),
    ],
    ids=["ignored", "another ignored", "smoothed", "pixels", "probabilities", "smoothed probabilities", "NLL"],
)
def test_sum_by_weight_is_the_mean_of_torch(loss: nn.Module, output: torch.Tensor, target: torch.Tensor):
    before = copy.deepcopy(vars(loss)["reduction"])
    total, weight = convert_class_weights(loss)(output, target)
    torch.testing.assert_close(total / weight, loss(output, target), rtol=1e-12, atol=0)
    assert loss.reduction == before


def test_rows_without_a_weight_have_a_gradient_of_zero():
    loss = ClassWeightedLoss(nn.CrossEntropyLoss(torch.tensor([1.0, 0.0, 0.0])))
    output = torch.zeros(2, 3, requires_grad=True)
    total, weight = loss(output, torch.tensor([1, 2]))
    total.backward()
    assert weight == 0
    assert not output.grad.any()


class Focal(nn.CrossEntropyLoss):
    """Loss of a user's own, whose normalizer is unknown."""


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(), Focal(WEIGHT), nn.BCEWithLogitsLoss(WEIGHT)])
def test_other_losses_stay_as_they_are(loss: Any):
    assert convert_class_weights(loss) is loss


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_class_weights_are_taken(kind: Any):
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        train(cluster, nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), loss=kind(WEIGHT.float()), start=False).stop()


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (torch.ones(4), "the loss has 4 class weights, and the model's output 3 classes; it needs one weight for each"),
        (WEIGHT, r"class weights in float64, .* output is torch.float32; convert them, as in weight=w.float\(\)"),
    ],
    ids=["number", "type"],
)
def test_unfit_class_weights_are_refused_before_anything_is_sent(weights: torch.Tensor, expected: str):
    with (
        dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster,
        pytest.raises(FirstBatchError, match=expected),
    ):
        train(cluster, loss=nn.CrossEntropyLoss(weights))

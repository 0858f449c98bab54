"""Losses and metrics that combine each output with every target: what is refused, and what is meant."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit.errors import FirstBatchError
from dtkit.testing.fake_transport import FakeTransport
from tests.support.small import ROWS, data, train

if TYPE_CHECKING:
    from collections.abc import Iterator

INPUTS, _ = data()


@pytest.fixture
def cluster() -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as made:
        yield made


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def square_squeezed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output.squeeze() - target) ** 2).mean()


def square_step(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, target = batch
    return square(model(inputs), target)


def square_chosen(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chosen = output.gather(1, torch.zeros(len(output), 1, dtype=torch.long))
    return (chosen - target).abs().mean()


class KeptMean(nn.Linear):
    """Layer whose mean over units keeps its axis."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).mean(1, keepdim=True)


class OwnLoss(nn.Linear):
    """Model that computes its loss itself."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": square(super().forward(inputs), labels)}


@pytest.mark.parametrize(
    ("model", "options", "squeeze_targets"),
    [
        (nn.Linear(4, 1), {"loss": nn.MSELoss()}, True),
        (nn.Linear(4, 1), {"loss": square}, True),
        (nn.Linear(4, 1), {"loss": nn.PoissonNLLLoss()}, True),
        (nn.Linear(4, 1), {"loss": square_squeezed}, False),
        (nn.Linear(4, 3), {"loss": square_chosen}, True),
        (KeptMean(4, 3), {"loss": square}, True),
        (nn.Linear(4, 1), {"loss": None, "training_step": square_step}, True),
        (OwnLoss(4, 1), {"loss": None}, True),
        (nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (1, 2, 3))), {"loss": square}, None),
    ],
    ids=["mse_loss", "own", "poisson", "squeezed", "gather", "keepdim", "training_step", "own loss", "images"],
)
def test_loss_that_combines_each_output_with_every_target_is_refused(
    cluster: dtkit.Cluster,
    model: nn.Module,
    options: dict[str, Any],
    *,
    squeeze_targets: bool | None,
):
    target = torch.rand(ROWS, 2, 3) if squeeze_targets is None else INPUTS[:, :1]
    rows = INPUTS, target.squeeze(1) if squeeze_targets else target
    with pytest.raises(FirstBatchError, match=r"the loss combines outputs of shape .* with targets of shape") as caught:
        train(cluster, model, rows, **options)
    assert re.search(
        r"Give both one shape, by output\.(un)?squeeze\(1\), or by target\.(un)?squeeze\(1\)", str(caught.value)
    )


def test_refused_pairs_name_shapes_and_the_users_line(cluster: dtkit.Cluster):
    with pytest.raises(FirstBatchError) as caught:
        train(cluster, nn.Linear(4, 1), (INPUTS, INPUTS[:, 0]), loss=square)
    lines = str(caught.value).splitlines()
    assert "outputs of shape (8, 1) with targets of shape (8,): torch repeats both" in lines[0]
    assert "by output.squeeze(1), or by target.unsqueeze(1)" in lines[0]
    assert "in square" in lines[1]
    assert "((output - target) ** 2).mean()" in lines[2]


def contrast_distances(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    squares = (output**2).sum(1, keepdim=True) + (target**2).sum(1) - 2 * output @ target.T
    return F.cross_entropy(-squares, torch.arange(len(output)))


def contrast_products(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ target.T - torch.cdist(output, target), torch.arange(len(output)))


def compare_pairs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    same = target[:, :1] == target[:, 0]
    return (F.softplus(output[:, :1] - output[:, 0]) * same).mean()


def weigh_and_mask(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weights, mask = torch.tensor([1.0, 2.0, 3.0, 4.0]), target > 0
    return ((output - target) ** 2 * weights * mask).mean()


def take_quantiles(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    error = target[:, :1] - output
    return torch.maximum(0.3 * error, -0.7 * error).mean()


@pytest.mark.parametrize(
    ("loss", "is_in_pairs"),
    [
        (contrast_distances, True),
        (contrast_products, True),
        (compare_pairs, True),
        (weigh_and_mask, False),
        (take_quantiles, False),
        (square, False),
    ],
)
def test_loss_that_broadcasts_on_purpose_is_not_refused(cluster: dtkit.Cluster, loss: Any, *, is_in_pairs: bool):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(cluster, nn.Linear(4, 4), (INPUTS, INPUTS), loss=loss, start=False).stop()
    texts = [str(warning.message) for warning in caught]
    assert any("is not the mean of the losses of its parts" in text for text in texts) == is_in_pairs
    named = any("combines outputs of shape (8, 1) with targets of shape (8,), each output" in text for text in texts)
    assert named == (loss is contrast_distances)


@pytest.mark.parametrize("added_to", ["output", "target"])
def test_pairs_are_taken_as_the_error_says(cluster: dtkit.Cluster, added_to: str):
    def compare_all(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output, target = output.squeeze(1), target.squeeze(1)
        return ((output[:, None] - target if added_to == "output" else output - target[:, None]) ** 2).mean()

    with pytest.warns(
        UserWarning, match=r"combines outputs of shape \(8(, 1)?,?\) with targets of shape .* each output"
    ):
        train(cluster, nn.Linear(4, 1), (INPUTS, INPUTS[:, :1]), loss=compare_all, start=False).stop()


def accuracy_of_pairs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output > 0) == target).float().mean()


def test_metric_that_combines_each_output_with_every_target_is_refused(cluster: dtkit.Cluster):
    rows = INPUTS, INPUTS[:, 0]
    with pytest.raises(FirstBatchError, match=r"metric 'acc' combines outputs of shape \(8, 1\) with targets of"):
        train(
            cluster,
            nn.Linear(4, 1),
            rows,
            loss=lambda output, target: square(output.squeeze(1), target),
            validation=rows,
            metrics={"acc": accuracy_of_pairs},
        )

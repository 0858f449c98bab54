"""Losses and metrics that combine each output with every target: what is refused, and what is meant."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtkit.errors import FirstBatchError
from tests.support.small import ROWS, data, train

if TYPE_CHECKING:
    import dtkit

INPUTS, CLASSES = data()


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


def square_transposed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return square(output.T, target)


def classify_transposed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.T, target)


@pytest.mark.parametrize(
    ("model", "loss", "target", "problem"),
    [
        (nn.Linear(4, 1), square_transposed, INPUTS[:, :1], r"shape \(1, 8\) with targets of shape \(8, 1\).*as \.T"),
        (
            nn.Linear(4, 1),
            lambda output, target: F.mse_loss(output.T, target),
            INPUTS[:, :1],
            r"shape \(1, 8\) with targets of shape \(8, 1\).*as \.T",
        ),
        (
            nn.Linear(4, 1),
            lambda output, target: F.binary_cross_entropy_with_logits(output.T, target),
            (INPUTS[:, :1] > 0).float(),
            r"shape \(1, 8\), and the targets \(8, 1\): one of both looks transposed",
        ),
        (nn.Linear(4, 8), classify_transposed, CLASSES, r"outputs of shape \(8, 8\), and fails for 9 rows, .*as \.T"),
        (nn.Linear(4, 8), square_transposed, torch.cat([INPUTS, INPUTS], 1), r"fails for 9 rows, .*such as \.T"),
        (nn.Linear(4, 3), classify_transposed, CLASSES, "gets 3 rows of outputs, .* 8 targets.*looks transposed"),
    ],
    ids=["own", "mse_loss", "bce", "square classes", "square numbers", "classes"],
)
def test_loss_of_a_transposed_output_is_refused(
    cluster: dtkit.Cluster, model: nn.Module, loss: Any, target: torch.Tensor, problem: str
):
    with pytest.raises((ValueError, FirstBatchError), match=problem):
        train(cluster, model, (INPUTS, target), loss=loss)


def contrast_both_ways(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits, labels = output @ target.T, torch.arange(len(output))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def contrast_images(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0]) @ model(batch[0] * 2).T
    return contrast_both_ways(logits, torch.eye(len(logits)))


class ColumnsOfSamples(nn.Linear):
    """Model whose output has a column for each sample."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).T


class EightRows(nn.Linear):
    """Model that takes batches of eight rows alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).reshape(8, 8)


def distances_of_columns(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    squares = (output**2).sum(1, keepdim=True) + (target**2).sum(1, keepdim=True).T
    return F.cross_entropy(2 * output @ target.T - squares, torch.arange(len(output)))


def pairs_of_columns(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (F.softplus(output[:, :1] - output[:, :1].T) * (target[:, :1] > target[:, :1].T)).mean()


@pytest.mark.parametrize(
    ("model", "options", "target"),
    [
        (nn.Linear(4, 8), {"loss": contrast_both_ways}, INPUTS.repeat(1, 2)),
        (nn.Linear(4, 8), {"loss": None, "training_step": contrast_images}, INPUTS),
        (nn.Linear(4, 8), {"loss": distances_of_columns}, INPUTS.repeat(1, 2)),
        (nn.Linear(4, 8), {"loss": pairs_of_columns}, INPUTS),
        (nn.Linear(4, 1), {"loss": pairs_of_columns}, INPUTS),
        (nn.Linear(4, 8), {"loss": nn.CrossEntropyLoss()}, CLASSES),
        (ColumnsOfSamples(4, 8), {"loss": classify_transposed}, CLASSES),
        (EightRows(4, 8), {"loss": nn.CrossEntropyLoss()}, CLASSES),
        (nn.Linear(4, 1), {"loss": lambda output, target: F.mse_loss(output.T, target.T)}, INPUTS[:, :1]),
    ],
)
def test_transposed_outputs_on_purpose_are_not_refused(
    cluster: dtkit.Cluster, model: nn.Module, options: dict[str, Any], target: torch.Tensor
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".* is not the mean of the losses of its parts")
        train(cluster, model, (INPUTS, target), start=False, **options).stop()


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

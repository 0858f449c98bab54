"""Losses that ranks can't compute in parts, and losses that use the notebook's model instead of the engines'."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit.data.loss_check import check_gradients_reach_model, describe_parts
from dtkit.strategies.loss import Loss
from tests.support.small import data, net, train

BATCH = tuple(tensor[:8] for tensor in data())
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2])
OWN_MODEL = net()


def weigh_classes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, weight=CLASS_WEIGHTS)


def contrast(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def sum_up(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="sum") / 64


def regularize(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) + 0.1 * sum(p.square().sum() for p in OWN_MODEL.parameters())


def add_noise(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output + torch.randn_like(output), target)


def contrast_labels(output: torch.Tensor, target: torch.Tensor) -> Any:
    return contrast(output, target) * len(target), len(target)


def divide_by_constant(output: torch.Tensor, target: torch.Tensor) -> Any:
    return F.cross_entropy(output, target, reduction="sum"), 64.0


@pytest.mark.parametrize("loss", [weigh_classes, contrast, contrast_labels, divide_by_constant])
def test_loss_that_is_not_a_mean_over_samples_is_described(loss: Any):
    assert "is not the mean of the losses of its parts" in (describe_parts(Loss(loss), net(), BATCH) or "")


def test_class_weights_are_found_in_rows_of_one_class():
    batch = BATCH[0], torch.zeros_like(BATCH[1])
    assert describe_parts(Loss(weigh_classes), net(), batch) is not None


def test_sum_over_samples_is_refused():
    with pytest.raises(ValueError, match="the loss is a sum over samples"):
        describe_parts(Loss(sum_up), net(), BATCH)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        add_noise,
        lambda output, target: (
            F.cross_entropy(output, target, weight=CLASS_WEIGHTS, reduction="sum"),
            CLASS_WEIGHTS[target].sum(),
        ),
        lambda output, target: F.cross_entropy(output, target) + 3.0,
    ],
    ids=["mean", "random", "pair", "mean and constant"],
)
def test_means_pairs_and_random_losses_pass(loss: Any):
    assert describe_parts(Loss(loss), net(), BATCH) is None


def test_modes_of_modules_are_restored():
    model = nn.Sequential(nn.Dropout(), nn.Linear(4, 3), nn.Dropout())
    model[0].eval()
    describe_parts(Loss(F.cross_entropy), model, BATCH)
    assert [module.training for module in model] == [False, True, True]


def test_captured_model_is_found_by_its_values():
    model = copy.deepcopy(OWN_MODEL)
    with pytest.raises(ValueError, match=r"uses the notebook's model by its own name"):
        check_gradients_reach_model(regularize(model(BATCH[0]), BATCH[1]), model)
    other = nn.Sequential(nn.Linear(4, 3))
    check_gradients_reach_model(regularize(other(BATCH[0]), BATCH[1]), other)


def test_train_refuses_a_loss_with_the_notebooks_model(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match="uses the notebook's model"):
        train(cluster, OWN_MODEL, loss=regularize)


def test_train_refuses_sums_and_warns_of_class_weights(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match="sum over samples"):
        train(cluster, loss=sum_up)
    with pytest.warns(UserWarning, match="is not the mean of the losses of its parts"):
        train(cluster, loss=weigh_classes)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strategy", [dtkit.ParameterAveraging(), dtkit.TensorParallel(2)], ids=str)
def test_ranks_with_whole_batches_take_any_loss(cluster: dtkit.Cluster, strategy: Any):
    train(cluster, loss=weigh_classes, strategy=strategy)


def scale(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.1


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_on_a_gradient_is_refused(cluster: dtkit.Cluster, kind: str):
    model = net()
    getattr(model[0].weight, kind)(scale)
    with pytest.raises(ValueError, match=r"0.weight has a hook on its gradient"):
        train(cluster, model)
    with pytest.raises(ValueError, match="has a hook"):
        cluster.broadcast(model)

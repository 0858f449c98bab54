"""Losses of batches: valid return values of user functions, and the errors for all others."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtkit.data.partition import Partition
from dtkit.engine.checks import add_batch_norm_hint, check_batch_norm
from dtkit.engine.data.batches import ShardedBatches, Shards
from dtkit.engine.data.sources import ArraySource
from dtkit.rpc.job_plan import JobPlan
from dtkit.strategies.base import TrainingProgram
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.loss import LabelWeight, Loss
from dtkit.strategies.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from dtkit.strategies.base import Strategy


def batch(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=generator), torch.arange(rows) % 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def test_mean_loss_has_no_weight():
    x, y = batch()
    network = model()
    loss, weight = Loss(nn.CrossEntropyLoss(), None)(network, (x, y))
    assert weight is None
    assert loss.item() == pytest.approx(F.cross_entropy(network(x), y).item())
    assert loss.requires_grad


@pytest.mark.parametrize("weight", [torch.tensor(5), 5, 5.0, torch.tensor([5.0])])
def test_pair_is_a_sum_and_a_weight(weight):
    total, actual = Loss(lambda out, y: (out.sum(), weight), None)(model(), batch())
    assert actual is not None
    assert (actual.item(), actual.shape, actual.dtype) == (5.0, (), torch.float64)
    assert total.shape == ()


def test_a_mean_over_no_label_counts_as_nothing():
    loss = Loss(nn.CrossEntropyLoss(ignore_index=-1), None, label_weight=LabelWeight(-1))
    total, weight = loss(model(), (batch()[0], torch.full((6,), -1)))
    assert weight is not None
    assert (total.item(), weight.item()) == (0, 0)


def test_loss_with_one_element_becomes_a_scalar():
    loss, _ = Loss(lambda out, y: out.sum().reshape(1, 1), None)(model(), batch())
    assert loss.shape == ()


def test_several_inputs_keep_their_order():
    class Two(nn.Module):
        def forward(self, a, b):
            return a - b

    loss, _ = Loss(lambda out, y: (out * y).sum(), None)(Two(), (torch.tensor(5.0), torch.tensor(3.0), 2))
    assert loss.item() == 4


def test_training_step_gets_the_batch_unchanged():
    def step(network, given):
        return network(given["x"]).sum(), len(given["x"])

    x, _ = batch()
    total, weight = Loss(None, step)(model(), {"x": x})
    assert weight is not None
    assert (weight.item(), total.item()) == (6, pytest.approx(model()(x).sum().item()))
    output = Loss(None, step).evaluate_batch(model(), {"x": x})
    assert output.output is output.target is None
    assert output.loss.item() == pytest.approx(total.item())


def test_evaluate_batch_returns_output_target_and_loss():
    x, y = batch()
    output = Loss(nn.CrossEntropyLoss(), None).evaluate_batch(model(), (x, y))
    assert torch.equal(output.output, model()(x))
    assert torch.equal(output.target, y)
    assert output.loss.item() == pytest.approx(F.cross_entropy(output.output, y).item())
    assert output.loss_weight is None


BAD = {
    "not reduced": (
        lambda out, y: F.cross_entropy(out, y, reduction="none"),
        r"loss returned a tensor of shape \(6,\); it must return a scalar tensor.* Use reduction='mean'",
    ),
    "a number": (lambda out, y: 1.0, r"loss returned float; it must return a scalar tensor.* without \.item\(\)"),
    "nothing": (lambda out, y: None, r"loss returned nothing \(None\); it must return .* Add a return"),
    "three things": (lambda out, y: (out.sum(), 1, 2), "loss returned tuple"),
    "a pair of a number": (lambda out, y: (1.0, 2.0), "loss returned float"),
    "a weight per sample": (
        lambda out, y: (out.sum(), torch.ones(6)),
        r"loss returned a weight of shape \(6,\); it must be one number. Call .sum\(\) on it",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_losses_raise(name):
    loss, message = BAD[name]
    with pytest.raises(TypeError, match=re.compile(message, re.DOTALL)):
        Loss(loss, None)(model(), batch())
    with pytest.raises(TypeError, match=re.compile(message.replace("loss", "training_step", 1), re.DOTALL)):
        Loss(None, lambda network, given: loss(network(given[0]), given[1]))(model(), batch())


@pytest.mark.parametrize(
    ("given", "form"),
    [({"x": 1, "y": 2}, "a dict with 'x', 'y'"), ((torch.zeros(2, 4),), "1 array"), (torch.zeros(2, 4), "a Tensor")],
)
def test_batch_without_a_target_needs_a_training_step(given, form):
    loss_fn = Loss(nn.CrossEntropyLoss(), None)
    message = rf"a batch of this data is {form}; with loss= .*, as in \(X, y\)\. .* use training_step="
    for call in (loss_fn, loss_fn.evaluate_batch):
        with pytest.raises(TypeError, match=message):
            call(model(), given)


def test_a_dict_without_a_target_is_told_how_to_name_one():
    with pytest.raises(TypeError, match=r"Name the target, as in target='y', or have the Dataset return a tuple"):
        Loss(nn.CrossEntropyLoss(), None)(model(), {"y": batch()[1], "x": batch()[0]})


def test_ignored_targets_raise_with_the_pair_as_remedy():
    x, y = batch()
    loss_fn = Loss(nn.CrossEntropyLoss(ignore_index=1), None)
    message = r"targets contain ignore_index=1: .*returns \(sum, weight\): lambda out, y"
    with pytest.raises(ValueError, match=message):
        loss_fn(model(), (x, y))
    with pytest.raises(ValueError, match=message):
        loss_fn.with_checked_targets(y)


def test_known_targets_are_checked_once():
    x, y = batch()
    loss_fn = Loss(nn.CrossEntropyLoss(), None).with_checked_targets(y)
    assert not loss_fn.check_ignore_index
    assert loss_fn(model(), (x, y))[0].isfinite()
    assert Loss(nn.MSELoss(), None).with_checked_targets(y).check_ignore_index is False
    assert Loss(None, lambda m, b: b).with_checked_targets(y).training_step is not None


# -- batch normalization of a single sample ------------------------------------------------------------------


def check(
    network: nn.Module,
    inputs: torch.Tensor,
    batch_size: int,
    loss_fn: Loss | None = None,
    strategy: Strategy | None = None,
) -> None:
    strategy = strategy or DataParallel()
    part = Partition(len(inputs), 2)
    source = ArraySource([inputs, torch.zeros(len(inputs))])
    stream = ShardedBatches(
        source, Shards(part.flatten_indices(), part.sizes), JobPlan(batch_size, 10, "shard", 0), [0]
    )
    if strategy.pipeline_schedule is not None:
        stream.set_shares([1.0])
    program = TrainingProgram(loss_fn or Loss(nn.MSELoss(), None), torch.optim.SGD, strategy)
    check_batch_norm(network.train(), program, lambda n: source.take(np.arange(n) % len(source)), stream)


def test_batch_norm_refuses_a_single_sample():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    with pytest.raises(
        ValueError, match=r"1 \(BatchNorm1d\) can't normalize one sample, and step 2 .* rank (0|1) just"
    ):
        check(network, torch.zeros(21, 4), 10)
    assert network.training
    assert not network[1]._forward_pre_hooks  # the check removes its hooks
    assert not network[1].running_mean.any()


@pytest.mark.parametrize(
    ("strategy", "samples", "message"),
    [
        (Pipeline(2, 4), 19, r"step 2 .* gives the model 3 samples for micro_batches=4, so a micro-batch has just one"),
        (Pipeline(2, 4), 20, "Use drop_last=True, which leaves out the last batch, or choose another batch_size or a"),
        (DataParallel(accumulate=2), 22, r"step 2 .* gives replica 0 3 samples for accumulate=2"),
        (Pipeline(2, 8), 16, r"step 0 .* gives the model 8 samples for micro_batches=8.*Choose .* which makes 16"),
        (Pipeline(2, 4), 24, None),
        (Pipeline(2, 2), 20, None),
        (DataParallel(accumulate=2), 24, None),
    ],
)
def test_batch_norm_refuses_a_single_sample_in_a_micro_batch(strategy, samples, message):
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    expected = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with expected:
        check(network, torch.zeros(samples, 4), 8, strategy=strategy)


def test_batch_norm_2d_refuses_a_single_pixel_and_accepts_several():
    network = nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\) can't normalize one sample"):
        check(network, torch.zeros(21, 2, 2, 2), 10)
    check(network, torch.zeros(21, 2, 3, 3), 10)


def test_batch_norm_check_accepts_harmless_models():
    flat = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    check(flat, torch.zeros(20, 4), 10)  # no single sample
    check(nn.BatchNorm1d(4), torch.zeros(21, 4, 7), 10)  # seven values a sample
    check(nn.Linear(4, 1), torch.zeros(21, 4), 10)
    frozen = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    frozen.train = lambda mode=True: frozen  # a model in evaluation mode
    frozen[1].eval()
    check(frozen, torch.zeros(21, 4), 10)
    check(flat, torch.zeros(21, 4), 10, Loss(None, lambda m, b: b))  # only the user's training step calls the model


def test_torch_s_batch_norm_error_gets_the_remedy():
    network = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        network(torch.zeros(1, 4))
    add_batch_norm_hint(caught.value)
    assert "batch_size that leaves every rank, and each micro-batch, two samples or none" in caught.value.__notes__[0]
    other = ValueError("something else")
    add_batch_norm_hint(other)
    assert not hasattr(other, "__notes__")

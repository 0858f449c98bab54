"""Outputs, inputs and buffers of pipeline stages, for typical models; compared with one process."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.support.marks import slow
from tests.support.nets import WIDTH
from tests.support.oracle import BOUND, CLASSES, FEATURES, SEED, data, max_difference, momentum
from tests.support.small import check_usable
from tests.support.stage_models import (
    ALL,
    SCHEDULES,
    STEPS,
    Blocks,
    check_equals_one_process,
    loss,
    make_rows,
    train,
    train_alone,
)

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("cluster", [2], indirect=True)]

# -- outputs without one row per sample ----------------------------------------------------------


class Views(Blocks):
    """Model that returns two rows per sample, as for a contrastive loss."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(torch.cat([x, x * 2]))


class Tokens(Blocks):
    """Model that returns several rows of scores per sample, in one matrix."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return torch.stack([scores, scores * 2], 1).view(-1, CLASSES)


class Auxiliary(Blocks):
    """Model that returns a number next to the scores."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return {"scores": scores, "size": scores.square().mean()}


def views_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    first, second = output.chunk(2)
    return F.cross_entropy(first * second, target)


def tokens_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target.repeat_interleave(2))


def auxiliary_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["scores"], target) + output["size"]


OTHER_ROWS = [(Tokens, tokens_loss), slow(Views, views_loss), slow(Auxiliary, auxiliary_loss)]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "loss_fn"), OTHER_ROWS)
def test_output_with_other_rows_trains_when_micro_batches_are_full(cluster: dtkit.Cluster, make: Any, loss_fn: Any):
    """Five batches of 24 samples have full micro-batches only."""
    expected = train_alone(make, loss_fn, STEPS - 1)
    for strategy in ALL:
        run = train(cluster, make, strategy, loss_fn, STEPS - 1)
        assert max_difference(run.model.state_dict(), expected.state_dict()) <= BOUND, strategy


@pytest.mark.slow
@pytest.mark.parametrize(("make", "loss_fn"), OTHER_ROWS)
def test_output_with_other_rows_is_refused_when_it_must_be_split(cluster: dtkit.Cluster, make: Any, loss_fn: Any):
    """The sixth batch has one sample, and evaluation joins the outputs of micro-batches."""
    rule = r"returned a tensor of shape .* for 8 samples.* one row for each sample.*replicas \* micro_batches divides"
    with pytest.raises(dtkit.errors.EngineError, match=rule):
        train(cluster, make, SCHEDULES[0], loss_fn)
    check_usable(cluster)
    run = train(cluster, make, SCHEDULES[0], loss_fn, 1)
    with pytest.raises(dtkit.errors.EngineError, match=rule):
        run.evaluate(make_rows(make))
    check_usable(cluster)


# -- inputs modified in place -------------------------------------------------------------------------------


def make_in_place() -> nn.Module:
    """Return a model in which every second layer modifies its input in place."""
    sizes = [FEATURES, *[WIDTH] * 4]
    pairs = [(nn.Linear(a, b), nn.ReLU(inplace=True)) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*pairs), nn.Linear(WIDTH, CLASSES))


class InPlaceLayer(nn.Module):
    """Layer that modifies its input in place, without a flag that shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight(x.mul_(2))


class Overwriting(Blocks):
    """Model that uses the inputs of its layers again after they were modified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InPlaceLayer() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.head(x)


@pytest.mark.slow
def test_stage_may_begin_with_an_in_place_layer(cluster: dtkit.Cluster):
    check_equals_one_process(
        cluster,
        make_in_place,
        [dataclasses.replace(s, split=["1", "3", "5"] if s.pipeline_schedule.stages == 4 else ["3"]) for s in ALL],
    )


@pytest.mark.slow
def test_input_modified_in_place_may_be_used_again(cluster: dtkit.Cluster):
    check_equals_one_process(cluster, Overwriting, ALL)


# -- outputs that only training has -----------------------------------------------------------------------


class Supervised(Blocks):
    """Model that in training also returns the scores of an inner block."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = first = self.blocks[0](self.embed(x))
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return (self.head(x), self.aux(first)) if self.training else self.head(x)


def supervised_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return sum(F.cross_entropy(scores, target) for scores in (output if isinstance(output, tuple) else (output,)))


def test_model_that_returns_more_in_training_is_evaluated_exactly(cluster: dtkit.Cluster):
    expected = train_alone(Supervised, supervised_loss)
    inputs, targets = make_rows(Supervised)
    with torch.no_grad():
        expected_loss = supervised_loss(expected.eval()(inputs), targets).item()
    for strategy in ALL:
        run = train(cluster, Supervised, strategy, supervised_loss)
        assert max_difference(run.model.state_dict(), expected.state_dict()) <= BOUND
        assert run.evaluate(make_rows(Supervised)).values["loss"] == pytest.approx(expected_loss, abs=BOUND), strategy


# -- batch statistics -----------------------------------------------------------------------------------------


def make_batch_norm_net() -> nn.Module:
    torch.manual_seed(2)
    first = [nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Tanh()]
    return nn.Sequential(*first, nn.Conv1d(4, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, CLASSES)).double()


@pytest.mark.slow
def test_empty_micro_batch_does_not_change_batch_statistics(cluster: dtkit.Cluster):
    """Batches of eight samples and of three, each in eight micro-batches."""
    (inputs, targets), expected = (t[:11] for t in data()), make_batch_norm_net()
    update = momentum(expected.parameters())
    order = np.random.default_rng([SEED, 0]).permutation(np.arange(11))  # as shuffle="global" promises
    for step in (order[:8], order[8:]):
        update.zero_grad()
        for k in step:
            (loss(expected(inputs[k : k + 1]), targets[k : k + 1]) / len(step)).backward()
        update.step()
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        options: dict[str, Any] = {"optimizer": momentum, "loss": loss, "batch_size": 8, "steps": 2, "seed": SEED}
        strategy = dtkit.Pipeline(2, 8, schedule, balance_by="parameters")
        with pytest.warns(UserWarning, match=r"2 \(BatchNorm1d\) normalizes .* those of a micro-batch only"):
            run = cluster.train(
                make_batch_norm_net(), (inputs, targets), strategy=strategy, shuffle="global", **options
            )
        run.wait(60)
        assert max_difference(run.model.state_dict(), expected.state_dict()) <= BOUND, schedule

"""What a pipeline's stages do to outputs, inputs and buffers of models as people write them; against one process."""

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
from tests.support.nets import WIDTH
from tests.support.oracle import BOUND, CLASSES, FEATURES, SEED, data, difference, momentum
from tests.support.small import check_usable
from tests.support.stage_models import ALL, SCHEDULES, STEPS, Blocks, alone, check, loss, rows, train

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("cluster", [2], indirect=True)]

# -- outputs that have other rows than there are samples ----------------------------------------------------------


class Views(Blocks):
    """Two views of each sample, one behind the other, as for a contrastive loss."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(torch.cat([x, x * 2]))


class Tokens(Blocks):
    """Several rows of scores for each sample, in one matrix."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return torch.stack([found, found * 2], 1).view(-1, CLASSES)


class Auxiliary(Blocks):
    """A number besides the scores."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return {"scores": found, "size": found.square().mean()}


def of_views(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    one, other = output.chunk(2)
    return F.cross_entropy(one * other, target)


def of_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target.repeat_interleave(2))


def of_both(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["scores"], target) + output["size"]


OTHERWISE = [(Views, of_views), (Tokens, of_tokens), (Auxiliary, of_both)]


@pytest.mark.parametrize(("make", "judge"), OTHERWISE)
def test_an_output_that_need_not_be_cut_is_judged_as_it_is(cluster: dtkit.Cluster, make: Any, judge: Any):
    """All micro-batches of five batches of 24 samples are full."""
    expected = alone(make, judge, STEPS - 1)
    for strategy in ALL:
        run = train(cluster, make, strategy, judge, STEPS - 1)
        assert difference(run.model.state_dict(), expected.state_dict()) <= BOUND, strategy


@pytest.mark.parametrize(("make", "judge"), OTHERWISE)
def test_an_output_that_can_t_be_cut_is_refused(cluster: dtkit.Cluster, make: Any, judge: Any):
    """The sixth batch has one sample; and an evaluation joins the outputs of micro-batches."""
    rule = r"returned a tensor of shape .* for 8 samples.* one row for each sample.*replicas \* micro_batches divides"
    with pytest.raises(dtkit.errors.EngineError, match=rule):
        train(cluster, make, SCHEDULES[0], judge)
    check_usable(cluster)
    run = train(cluster, make, SCHEDULES[0], judge, 1)
    with pytest.raises(dtkit.errors.EngineError, match=rule):
        run.evaluate(rows(make))
    check_usable(cluster)


# -- inputs that are written to -------------------------------------------------------------------------------


def rectified() -> nn.Module:
    """Every second layer changes what it is given, in place."""
    sizes = [FEATURES, *[WIDTH] * 4]
    pairs = [(nn.Linear(a, b), nn.ReLU(inplace=True)) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*pairs), nn.Linear(WIDTH, CLASSES))


class Moving(nn.Module):
    """Changes what it is given, which no flag tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight(x.mul_(2))


class Overwriting(Blocks):
    """Uses its layers' inputs again, as changed by them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Moving() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.head(x)


def test_a_stage_may_begin_with_a_layer_that_writes_to_its_input(cluster: dtkit.Cluster):
    check(
        cluster,
        rectified,
        [dataclasses.replace(s, split=["1", "3", "5"] if s.pipeline_schedule.stages == 4 else ["3"]) for s in ALL],
    )


def test_what_a_stage_has_written_to_is_used_again(cluster: dtkit.Cluster):
    check(cluster, Overwriting, ALL)


# -- what is returned in training alone -----------------------------------------------------------------------


class Supervised(Blocks):
    """Returns scores of a block in its midst, too, while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = first = self.blocks[0](self.embed(x))
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return (self.head(x), self.aux(first)) if self.training else self.head(x)


def of_all(output: Any, target: torch.Tensor) -> torch.Tensor:
    return sum(F.cross_entropy(scores, target) for scores in (output if isinstance(output, tuple) else (output,)))


def test_evaluation_of_a_model_that_returns_more_in_training(cluster: dtkit.Cluster):
    expected = alone(Supervised, of_all)
    inputs, targets = rows(Supervised)
    with torch.no_grad():
        expected_loss = of_all(expected.eval()(inputs), targets).item()
    for strategy in ALL:
        run = train(cluster, Supervised, strategy, of_all)
        assert difference(run.model.state_dict(), expected.state_dict()) <= BOUND
        assert run.evaluate(rows(Supervised)).values["loss"] == pytest.approx(expected_loss, abs=BOUND), strategy


# -- batch statistics -----------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    torch.manual_seed(2)
    first = [nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Tanh()]
    return nn.Sequential(*first, nn.Conv1d(4, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, CLASSES)).double()


def test_a_micro_batch_without_a_sample_leaves_no_trace_in_batch_statistics(cluster: dtkit.Cluster):
    """Eight samples, and then three, in eight micro-batches: those of one sample are in no need of copies."""
    (inputs, targets), expected = (t[:11] for t in data()), normalised()
    update = momentum(expected.parameters())
    order = np.random.default_rng([SEED, 0]).permutation(np.arange(11))  # as shuffle="global" promises
    for step in (order[:8], order[8:]):
        update.zero_grad()
        for k in step:
            (loss(expected(inputs[k : k + 1]), targets[k : k + 1]) / len(step)).backward()
        update.step()
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        how: dict[str, Any] = {"optimizer": momentum, "loss": loss, "batch_size": 8, "steps": 2, "seed": SEED}
        strategy = dtkit.Pipeline(2, 8, schedule, balance_by="parameters")
        with pytest.warns(UserWarning, match=r"2 \(BatchNorm1d\) normalizes .* those of a micro-batch only"):
            run = cluster.train(normalised(), (inputs, targets), strategy=strategy, shuffle="global", **how)
        run.wait(60)
        assert difference(run.model.state_dict(), expected.state_dict()) <= BOUND, schedule

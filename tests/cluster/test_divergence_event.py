"""A training whose loss explodes: its log says so once, and an engine killed on purpose is told as such."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    import dtkit

pytestmark = pytest.mark.cluster


def train(cluster: dtkit.Cluster, factor: float, **options: Any) -> dtkit.Run:
    torch.manual_seed(0)
    X = torch.randn(640, 8)
    return cluster.train(
        nn.Linear(8, 1),
        (X, X.sum(1, keepdim=True)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 if k < 60 else factor),
        batch_size=16,
        epochs=3,
        **({"loss": nn.MSELoss()} | options),
    )


def test_a_loss_that_explodes_is_one_event_of_the_log(cluster2: dtkit.Cluster):
    run = train(cluster2, 25.0)
    run.wait(60)
    (event,) = [event for event in run.history.events if event.kind == "diverged"]
    assert 60 < event.step < 120
    assert "times since step" in event.text
    assert run.verdict.cause == "diverged"
    assert re.search(r"^completed, .*: the loss diverged at step 6\d$", repr(run.status))


class NanFromStep10(nn.Module):
    """Loss with a term that has no gradient, and is NaN from the 11th call on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return (output - target).square().mean() + (float("nan") if self.num_calls > 10 else 0.0)


def test_a_loss_that_becomes_nan_by_itself_is_not_blamed_on_the_learning_rate(cluster2: dtkit.Cluster):
    run = train(cluster2, 1.0, loss=NanFromStep10())
    run.wait(60)
    assert run.verdict.cause == "diverged"
    assert "the gradients are finite, so the learning rate is not the cause" in run.verdict.text
    assert "lower" not in run.verdict.text


def test_a_loss_that_falls_is_no_event(cluster2: dtkit.Cluster):
    run = train(cluster2, 1.0)
    run.wait(60)
    assert "diverged" not in {event.kind for event in run.history.events}


def test_a_node_killed_on_purpose_is_told_as_such(cluster2: dtkit.Cluster):
    run = train(cluster2, 1.0, start=False)
    run.step(3)
    run.inject_fault("kill", 1)
    run.resume()
    run.wait(90)
    (event,) = [event for event in run.history.events if event.kind == "lost"]
    assert "dtkit ended its process, as it was told to" in event.text
    assert "silent" not in event.text

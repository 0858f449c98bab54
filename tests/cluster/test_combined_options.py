"""Options that could train wrong together, compared with a plain loop on the same rows, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from tests.support.oracle import (
    BOUND,
    CLASSES,
    FEATURES,
    SAMPLES,
    data,
    get_global_rows,
    max_difference,
    mean_loss,
    mlp,
    momentum,
    train,
    train_in_one_process,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cluster

STEPS, CLIP = 24, 0.2


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [5])


def with_hooks(lr_scheduler: Any, max_norm: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes an optimizer that clips before each update, and schedules after it."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer = momentum(parameters)
        scheduler = lr_scheduler(optimizer)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, max_norm) and None)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return make


@pytest.mark.slow
@pytest.mark.parametrize("lr_scheduler", [one_cycle, warm_up_then_cosine])
@pytest.mark.parametrize(
    "strategy",
    [
        dtkit.DataParallel(accumulate=3, clip_grad_norm=CLIP),
        dtkit.Sharded(accumulate=3, clip_grad_norm=CLIP),
        dtkit.Pipeline(2, 4, clip_grad_norm=CLIP),
    ],
    ids=repr,
)
def test_scheduler_of_each_batch_counts_updates_and_not_micro_batches(
    cluster2: dtkit.Cluster, strategy: Any, lr_scheduler: Any
):
    options = {"shuffle": "global", "steps": STEPS, "lr_scheduler": lr_scheduler}
    run = train(cluster2, mlp(), strategy=strategy, **options)
    optimizer = with_hooks(lr_scheduler, CLIP)
    expected = train_in_one_process(mlp(), get_global_rows, optimizer=optimizer, steps=STEPS)
    assert max_difference(run.model.state_dict(), expected) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        dtkit.DataParallel(clip_grad_norm=CLIP),
        dtkit.DataParallel(clip_grad_norm=CLIP, accumulate=2, bucket_cap_mb=0.0005),
        dtkit.NaiveDataParallel(),
        dtkit.Sharded(clip_grad_norm=CLIP),
    ],
    ids=repr,
)
def test_clipped_gradients_of_uneven_shards_are_those_of_the_whole_batch(cluster2: dtkit.Cluster, strategy: Any):
    """Three quarters of the rows are on one rank."""
    partition = cluster2.partition(data(), weights=[3, 1])
    run = train(cluster2, mlp(), partition, steps=STEPS, batch_size=SAMPLES, strategy=strategy)
    max_norm = CLIP if getattr(strategy, "clip_grad_norm", None) else 1e9
    optimizer = with_hooks(lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), max_norm)
    expected = train_in_one_process(mlp(), lambda _: np.arange(SAMPLES), optimizer=optimizer, steps=STEPS)
    assert max_difference(run.model.state_dict(), expected) < BOUND


class Normalized(nn.Module):
    """Batch normalization around blocks that are computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        result: torch.Tensor = self.head(x)
        return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics")
@pytest.mark.parametrize(
    "strategy", [dtkit.DataParallel(), dtkit.DataParallel(accumulate=2), dtkit.Sharded()], ids=repr
)
def test_batch_normalization_beside_activation_checkpointing(cluster2: dtkit.Cluster, strategy: Any):
    """Statistics are as without checkpointing, and each batch is counted once."""
    options = {"shuffle": "global", "steps": STEPS, "strategy": strategy, "batch_size": 25}
    expected = train(cluster2, Normalized().double(), **options).model.state_dict()
    run = train(cluster2, Normalized().double(), activation_checkpointing=True, **options)
    state = run.model.state_dict()
    assert max_difference(state, expected) < BOUND
    if strategy == dtkit.DataParallel():
        assert state["norm.num_batches_tracked"] == STEPS


@pytest.mark.slow
def test_bf16_autocast_equals_a_plain_loop_over_the_same_parts(cluster2: dtkit.Cluster):
    """Matrix products round; everything else, also the sum over ranks, has the parameters' type."""
    inputs, targets = data()
    rows = inputs.float(), targets
    strategy = dtkit.DataParallel(precision="bf16")
    run = train(cluster2, mlp().float(), cluster2.partition(rows), steps=STEPS, batch_size=SAMPLES, strategy=strategy)
    model = mlp().float()
    optimizer = momentum(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in np.array_split(np.arange(SAMPLES), 2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mean_loss(model(rows[0][part]), targets[part])
            (loss * (len(part) / SAMPLES)).backward()
        optimizer.step()
    assert max_difference(run.model.state_dict(), model.state_dict()) < 1e-5

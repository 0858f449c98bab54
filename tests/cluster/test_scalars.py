"""`dtkit.log` in a training: columns of the history, exact over ranks and micro-batches, without a line of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.nn import functional as F

import dtkit
from tests.support import small
from tests.support.marks import slow

if TYPE_CHECKING:
    import torch
    from torch import nn

pytestmark = pytest.mark.cluster


def log_in_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    dtkit.log(spread=x.mean(), weighted=(x.sum(), x.numel()))
    loss: torch.Tensor = F.cross_entropy(model(x), y)
    return loss


def return_numbers(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return F.cross_entropy(model(x), y), {"spread": x.mean(), "weighted": (x.sum(), x.numel())}


def log_in_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    dtkit.log(spread=output.new_tensor(1.0 * len(target)))
    loss: torch.Tensor = F.cross_entropy(output, target)
    return loss


@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        pytest.param(dtkit.DataParallel(accumulate=3), return_numbers, id="data, returned"),
        pytest.param(dtkit.Sharded(), log_in_step, id="sharded, logged"),
        slow(dtkit.DataParallel(accumulate=3), log_in_step, id="data, logged"),
        slow(dtkit.Sharded(), return_numbers, id="sharded, returned"),
    ],
)
def test_logged_numbers_are_means_over_all_samples(cluster2: dtkit.Cluster, strategy: Any, step: Any):
    options: dict[str, Any] = {"loss": None, "training_step": step, "shuffle": "global", "batch_size": 15, "steps": 6}
    run = small.train(cluster2, strategy=strategy, **options)
    run.wait(60)
    steps, values = run.history.scalar("spread")
    assert steps.tolist() == list(range(6))
    alone = small.train(cluster2, strategy=dtkit.DataParallel(accumulate=1), **options)
    alone.wait(60)
    assert values == pytest.approx(alone.history.scalar("weighted")[1], abs=1e-6)
    assert run.history.scalar("weighted")[1] == pytest.approx(values, abs=1e-6)
    assert set(run.history.to_pandas().columns) >= {"spread", "weighted"}
    assert not [event for event in run.history.events if event.kind == "print" and "spread" in event.text]


def test_last_stage_of_a_pipeline_logs(cluster2: dtkit.Cluster):
    run = small.train(cluster2, loss=log_in_loss, strategy=dtkit.Pipeline(2, 2), validation=small.data(), epochs=1)
    run.wait(60)
    assert run.history.scalar("spread")[1].tolist() == [8.0] * 4
    assert run.history.scalar("spread", rank=0)[0].tolist() == []


def test_numbers_of_the_machine_reach_the_last_step(cluster2: dtkit.Cluster):
    run = small.train(cluster2, steps=40)
    run.wait(60)
    for rank in (0, 1):
        for name in ("system/CPU (cores)", "system/memory (MB)"):
            assert run.history.scalar(name, rank)[0][-1] == 39


@pytest.mark.slow
def test_logged_numbers_survive_a_killed_engine():
    with dtkit.Cluster(2, threads=1) as cluster:
        run = small.train(
            cluster, loss=None, training_step=log_in_step, steps=60, checkpoint_every=None, snapshot_every=5
        )
        run.pause(60)
        run.inject_fault("kill", 1)
        run.resume()
        run.wait(120)
        assert run.history.scalar("spread")[0].tolist() == list(range(60))

"""The verdict on runs of real engines whose cause is planted."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dtkit
from tests.support.small import sgd, train

pytestmark = pytest.mark.cluster


class SlowOnRank1(Dataset):
    """Samples that take long to load on rank 1."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if torch.distributed.get_rank() == 1:
            # sleeps: a declared cost, since a loaded machine guarantees no other
            time.sleep(0.01)
        return torch.full((4,), float(index)), index % 3


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take a step of a declared cost."""
    # sleeps: as above
    time.sleep(0.02)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def take_steps(cluster: Any, model: nn.Module, rows: Any, steps: int, **options: Any) -> dtkit.Run:
    run = cluster.train(model, rows, optimizer=sgd, steps=steps + 10, start=False, **options)
    run.step(steps)
    return run


def test_slow_loading_on_one_rank_is_named_with_its_node(cluster2):
    model = nn.Linear(4, 3)
    run = take_steps(cluster2, model, SlowOnRank1(), 12, training_step=costly, batch_size=16)
    verdict = run.verdict
    assert verdict.cause == "data", verdict.text
    assert verdict.text.startswith("waiting for data on node 1: num_workers="), verdict.text
    assert verdict.text in repr(run)
    run.stop()


def test_a_delayed_rank_is_the_straggler(cluster2):
    run = train(cluster2, loss=None, training_step=costly, steps=40, start=False)
    run.inject_delay(1, 3)
    run.step(30)
    assert run.verdict.cause == "straggler", run.verdict.text
    assert "node 1" in run.verdict.text
    run.stop()


def test_large_gradients_of_a_small_computation_are_communication(cluster2):
    model = nn.Sequential(nn.EmbeddingBag(400_000, 16), nn.Linear(16, 2))
    rows = torch.randint(0, 400_000, (256, 2)), torch.randint(0, 2, (256,))
    run = take_steps(
        cluster2,
        model,
        rows,
        12,
        loss=nn.CrossEntropyLoss(),
        batch_size=16,
        strategy=dtkit.DataParallel(bucket_cap_mb=25),
    )  # by DDP, which sends them
    verdict = run.verdict
    assert verdict.cause in ("communication", "one process"), verdict.text  # which is surely faster here
    assert any(line.startswith("communication is ") for line in (verdict.text, *verdict.arithmetic))
    assert "batch_size=" in verdict.text
    run.stop()

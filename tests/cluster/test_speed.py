"""Partition of rows in proportion to measured speeds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small import data, net, train

pytestmark = pytest.mark.cluster


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take a step in which a row costs rank 1 twice as much as rank 0."""
    import torch.distributed as dist

    # sleeps: a declared cost that differs between ranks
    time.sleep(0.001 * len(batch[0]) * (1 + dist.get_rank()))
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_rank_at_half_speed_gets_a_third_of_the_rows(cluster2):
    part = cluster2.partition(data(), by="speed", model=net(), training_step=costly)
    assert part.by == "speed"
    assert sum(part.sizes) == part.n
    assert part.sizes[0] / part.n == pytest.approx(2 / 3, abs=0.06)
    run = train(cluster2, rows=part, loss=None, training_step=costly, steps=10)
    run.wait(60)
    samples = run.history.rows()["samples"]
    assert samples[::2].sum() / samples.sum() == pytest.approx(part.sizes[0] / part.n, abs=0.05)

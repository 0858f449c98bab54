"""Engines that reach their memory limit: they raise an error and stay usable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit import Pipeline, Sharded
from dtkit.mesh import Mesh
from tests.support.marks import slow
from tests.support.small import check_usable
from tests.support.waiting import ends_soon

if TYPE_CHECKING:
    from dtkit.strategies.base import Strategy

pytestmark = pytest.mark.cluster

LIMIT = 120 * 10**6
"""Enough for the parameters, gradients and optimizer state (106 MB), which are checked before."""
ZERO_BUBBLE = Pipeline(2, 8, schedule="ZBVZeroBubble")


def wide() -> nn.Module:
    """Return a model of 13 million parameters: 27 MB per rank of two, and four times that with AdamW's state."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(1280, 1280), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 1280), *layers, nn.Linear(1280, 10))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def list_pids(cluster: dtkit.Cluster) -> list[int]:
    return [node.pid for node in cluster.refresh_nodes()]


@pytest.mark.parametrize(
    ("strategy", "batch_size"),
    [slow(Pipeline(2, 8), 32), slow(ZERO_BUBBLE, 32), (Sharded(), 4096)],  # activations of 170 MB per rank
    ids=["1F1B", "ZBV", "Sharded"],
)
def test_exceeding_the_memory_limit_raises_and_keeps_the_engines(strategy: Strategy, batch_size: int):
    rows = torch.randn(batch_size, 64), torch.randint(10, (batch_size,))
    with dtkit.Cluster(2, threads=1, memory_limit=LIMIT) as cluster:
        before = list_pids(cluster)
        run = cluster.train(
            wide(),
            rows,
            loss=F.cross_entropy,
            optimizer=adam,
            batch_size=batch_size,
            steps=3,
            strategy=strategy,
            start=False,
        )
        with ends_soon(), pytest.raises(dtkit.errors.EngineError, match="allocate memory"):
            run.step()
        run.release()
        check_usable(cluster)
        assert list_pids(cluster) == before


def form_groups(free_bytes: int) -> None:
    """Form the groups of a pipeline with only that much memory left."""
    from dtkit.engine import memory_limit
    from dtkit.engine.session import get_session

    blocks = []
    while memory_limit.compute_data_left() > free_bytes + 2**20:
        blocks.append(torch.ones(2**18))
    group = get_session().state.group
    assert group is not None
    group.device_mesh(Mesh({"dp": 2, "pp": 1}), torch.device("cpu"))


def break_group() -> None:
    """Raise an error, after which the group is formed again."""
    raise LookupError("on purpose")


@pytest.mark.slow
def test_group_forms_when_memory_is_too_low_for_thread_stacks():
    """gloo ends the process if it can start only some of its threads."""
    with dtkit.Cluster(2, threads=1, memory_limit="200MB") as cluster:
        before = list_pids(cluster)
        for free_mb in range(34, 0, -8):  # a stack takes 8 MB
            cluster.run(form_groups, free_mb * 2**20)
            with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
                cluster.run(break_group)
        check_usable(cluster)
        assert list_pids(cluster) == before

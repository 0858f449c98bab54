"""Engines whose limit on memory is used up: the error says so, and they go on."""

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
from tests.support.waiting import soon

if TYPE_CHECKING:
    from dtkit.strategies.base import Strategy

pytestmark = pytest.mark.cluster

LIMIT = 120 * 10**6
ZERO_BUBBLE = Pipeline(2, 8, schedule="ZBVZeroBubble")


def wide() -> nn.Module:
    """13 million parameters: on each of two ranks 27 MB, which are four times as much with AdamW's state."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(1280, 1280), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 1280), *layers, nn.Linear(1280, 10))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def pids(cluster: dtkit.Cluster) -> list[int]:
    return [node.pid for node in cluster.refresh_nodes()]


@pytest.mark.parametrize(
    "strategy", [slow(Pipeline(2, 8)), slow(ZERO_BUBBLE), Sharded()], ids=["1F1B", "ZBV", "Sharded"]
)
def test_state_that_fills_the_limit_is_an_error_and_the_same_engines_go_on(strategy: Strategy):
    rows = torch.randn(64, 64), torch.randint(10, (64,))
    with dtkit.Cluster(2, threads=1, memory_limit=LIMIT) as cluster:
        before = pids(cluster)
        run = cluster.train(
            wide(), rows, loss=F.cross_entropy, optimizer=adam, batch_size=32, steps=3, strategy=strategy, start=False
        )
        with soon(), pytest.raises(dtkit.errors.EngineError, match="allocate memory"):
            run.step()
        run.release()
        check_usable(cluster)
        assert pids(cluster) == before


def form(left: int) -> None:
    """On an engine that may allocate no more than so many bytes: form the groups of a pipeline."""
    from dtkit.engine import memory_limit
    from dtkit.engine.session import get_session

    held = []
    while memory_limit.compute_data_left() > left + 2**20:
        held.append(torch.ones(2**18))
    group = get_session().group
    assert group is not None
    group.device_mesh(Mesh({"dp": 2, "pp": 1}), torch.device("cpu"))


def break_off() -> None:
    """On an engine: have the group formed anew."""
    raise LookupError("broken off")


def test_groups_are_formed_where_threads_have_no_room_for_their_stacks():
    """Room for the first of gloo's workers and not for the second ended the process, in C++."""
    with dtkit.Cluster(2, threads=1, memory_limit="200MB") as cluster:
        before = pids(cluster)
        for left in range(34, 0, -8):  # stacks are of 8 MB
            cluster.run(form, left * 2**20)
            with pytest.raises(dtkit.errors.EngineError, match="broken off"):
                cluster.run(break_off)
        check_usable(cluster)
        assert pids(cluster) == before

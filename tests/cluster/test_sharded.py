"""What is particular to sharded training: what lies where, and what can't be sharded."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtkit
from dtkit.dashboard.summary.timing import compute_step_timing
from dtkit.strategies.sharded import Sharded
from tests.support.nets import adamw, go, held, net, worker
from tests.support.oracle import BOUND, CLASSES, FEATURES, data, difference, mlp, train
from tests.support.small import check_usable
from tests.support.waiting import soon

pytestmark = pytest.mark.cluster


@pytest.fixture
def strategy(cluster: dtkit.Cluster) -> Sharded:
    """Among two engines; among four with replicas, so that each part lies on two of them."""
    return Sharded(cluster.world_size // 2)


def test_unequal_shards_and_verify(cluster: dtkit.Cluster, strategy: Sharded):
    part = cluster.partition(data(), weights=[1 + 2 * rank for rank in range(cluster.world_size)])
    run = train(cluster, net("decoder"), part, strategy=strategy, steps=20)
    found = run.verify(steps=20)
    assert found.verdict == "PASS"
    assert found.max_difference <= BOUND


def test_each_rank_holds_its_part_only(cluster: dtkit.Cluster, strategy: Sharded):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
    ).double()
    whole = sum(p.nbytes for p in model.parameters())
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=3)
    parameters, state = zip(*cluster.run(held), strict=True)
    assert sum(parameters) == whole * strategy.replicas
    assert max(parameters) <= 1.1 * whole / 2
    assert max(state) <= 2.2 * whole / 2
    assert run.verify(steps=2)


class Dawdling(nn.Tanh):
    """Takes much longer on one rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            threading.Event().wait(0.03)
        return super().forward(x)


def test_a_slow_rank_is_told_from_those_that_wait_for_it_in_a_gathering(cluster: dtkit.Cluster, strategy: Sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), Dawdling(), nn.Linear(8, 8), Dawdling(), nn.Linear(8, CLASSES))
    run = train(cluster, model.double(), strategy=strategy, steps=14)
    found = compute_step_timing(run.history, cluster.world_size)
    assert found.straggler is not None
    assert found.straggler.ranks == (1,)


class Choosing(nn.Module):
    """Uses one of two layers, by what its first row is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a if x[0, 0] > 0 else self.b)(x)


def test_unused_parameters_are_refused_and_kill_no_engine(cluster: dtkit.Cluster, strategy: Sharded):
    run = train(cluster, net(Choosing), strategy=strategy, start=False)
    with soon(), pytest.raises(dtkit.errors.EngineError, match=r"got no gradient.*requires_grad_\(False\)"):
        go(run)
    check_usable(cluster)


class Normalised(nn.Module):
    """A batch normalisation over several values of each sample, so that one sample alone is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.norm = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)
        self.out = nn.Linear(4 * (FEATURES - 2), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.norm(self.filters(x[:, None]))).flatten(1))


def test_a_rank_without_samples_leaves_no_trace_in_batch_statistics(cluster: dtkit.Cluster):
    def seen() -> int:
        return int(worker()._model.norm.num_batches_tracked)

    with pytest.warns(UserWarning, match="normalizes with the statistics"):
        run = train(cluster, net(Normalised), strategy=Sharded(), shuffle="global", steps=12)
    samples = run.history.column("samples").reshape(12, cluster.world_size)
    assert samples.min() == 0
    assert cluster.run(seen) == (samples > 0).sum(0).tolist()


def test_bf16_computes_in_bf16_and_keeps_the_rest(cluster: dtkit.Cluster, strategy: Sharded):
    inputs, targets = data()
    part = cluster.partition((inputs.float(), targets))
    run = train(cluster, mlp().float(), part, strategy=Sharded(strategy.replicas, precision="bf16"), steps=20)
    exact = train(cluster, mlp().float(), part, strategy=strategy, steps=20)
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert 1e-6 < difference(run.model.state_dict(), exact.model.state_dict()) < 0.1

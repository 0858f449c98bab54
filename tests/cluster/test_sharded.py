"""Sharded training: placement, models that can't be sharded, batch statistics, bf16."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtkit
from dtkit.dashboard.summary.timing import compute_step_timing
from dtkit.strategies.sharded import Sharded
from tests.support.nets import adamw, get_worker, make_net, measure_local_bytes, resume_and_wait
from tests.support.oracle import BOUND, CLASSES, FEATURES, data, max_difference, mlp, train
from tests.support.small import check_usable
from tests.support.waiting import ends_soon

pytestmark = pytest.mark.cluster


@pytest.fixture
def strategy(cluster: dtkit.Cluster) -> Sharded:
    """Sharding among two engines; on four engines with two replicas."""
    return Sharded(cluster.world_size // 2)


def test_verify_passes_with_unequal_shards(cluster: dtkit.Cluster, strategy: Sharded):
    part = cluster.partition(data(), weights=[1 + 2 * rank for rank in range(cluster.world_size)])
    run = train(cluster, make_net("decoder"), part, strategy=strategy, steps=20)
    verification = run.verify(steps=20)
    assert verification.verdict == "PASS"
    assert verification.max_difference <= BOUND


def test_each_rank_holds_only_its_shard(cluster: dtkit.Cluster, strategy: Sharded):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
    ).double()
    total = sum(p.nbytes for p in model.parameters())
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=3)
    parameters, state = zip(*cluster.run(measure_local_bytes), strict=True)
    assert sum(parameters) == total * strategy.replicas
    assert max(parameters) <= 1.1 * total / 2
    assert max(state) <= 2.2 * total / 2
    assert run.verify(steps=2)


class SlowTanh(nn.Tanh):
    """Activation that takes much longer on rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            threading.Event().wait(0.03)
        return super().forward(x)


def test_slow_rank_is_distinguished_from_ranks_that_wait_for_it(cluster: dtkit.Cluster, strategy: Sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), SlowTanh(), nn.Linear(8, 8), SlowTanh(), nn.Linear(8, CLASSES))
    run = train(cluster, model.double(), strategy=strategy, steps=14)
    timing = compute_step_timing(run.history, cluster.world_size)
    assert timing.straggler is not None
    assert timing.straggler.ranks == (1,)


class Branching(nn.Module):
    """Model that uses one of two layers, depending on its first row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a if x[0, 0] > 0 else self.b)(x)


def test_unused_parameters_are_refused_without_losing_an_engine(cluster: dtkit.Cluster, strategy: Sharded):
    with pytest.warns(UserWarning, match=r"a.weight, a.bias got no gradient from the first rows"):
        run = train(cluster, make_net(Branching), strategy=strategy, start=False)
    with ends_soon(), pytest.raises(dtkit.errors.EngineError, match=r"got no gradient.*requires_grad_\(False\)"):
        resume_and_wait(run)
    check_usable(cluster)


class BatchNormNet(nn.Module):
    """Model with batch normalization over several values per sample, so that one sample is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.norm = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)
        self.out = nn.Linear(4 * (FEATURES - 2), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.norm(self.filters(x[:, None]))).flatten(1))


def test_rank_without_samples_does_not_change_batch_statistics(cluster: dtkit.Cluster):
    def get_statistics() -> tuple[torch.Tensor, int]:
        norm = get_worker()._model.norm
        return norm.running_mean.clone(), int(norm.num_batches_tracked)

    with pytest.warns(UserWarning, match="normalizes with the statistics"):
        run = train(cluster, make_net(BatchNormNet), strategy=Sharded(), shuffle="global", steps=12, start=False)
    statistics = []
    for _ in range(12):
        run.step()
        statistics.append(cluster.run(get_statistics))
    samples = run.history.column("samples").reshape(12, cluster.world_size)
    assert samples.min() == 0
    for step, rank in zip(*(samples == 0).nonzero(), strict=True):
        assert torch.equal(statistics[step][rank][0], statistics[step - 1][rank][0])
    assert [count for _, count in statistics[-1]] == [12] * cluster.world_size  # as in one process


def test_bf16_precision_keeps_float32_parameters(cluster: dtkit.Cluster, strategy: Sharded):
    inputs, targets = data()
    part = cluster.partition((inputs.float(), targets))
    run = train(cluster, mlp().float(), part, strategy=Sharded(strategy.replicas, precision="bf16"), steps=20)
    exact = train(cluster, mlp().float(), part, strategy=strategy, steps=20)
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert 1e-6 < max_difference(run.model.state_dict(), exact.model.state_dict()) < 0.1


class ViewBlock(nn.Module):
    """Block whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).view(len(x), -1)


class Residual(nn.Module):
    """Model that adds to each block's output, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.blocks = nn.ModuleList([ViewBlock(), ViewBlock()])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            if self.in_place:
                y += x
            x = y if self.in_place else y + x
        return self.head(x)


def test_in_place_operation_on_a_view_from_a_block_names_the_remedy(cluster2: dtkit.Cluster):
    """FSDP2 warned of each view, in words of its own, and then failed in the backward pass with sizes of storage."""
    with ends_soon(), pytest.raises(dtkit.errors.EngineError, match=r"y = y \+ x") as raised:
        train(cluster2, Residual(in_place=True).double(), strategy=Sharded(), steps=2)
    assert "y += x" in str(raised.value)
    check_usable(cluster2)


def test_views_from_blocks_train_exactly_and_without_a_warning(
    cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]
):
    run = train(cluster2, Residual(in_place=False).double(), strategy=Sharded(), steps=4)
    assert "view" not in capsys.readouterr().out
    assert run.verify(steps=4).max_difference <= BOUND

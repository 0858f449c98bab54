"""Sharded training on 2 and 4 engines is that of one process, and holds a part of the model on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit.strategies.sharded import Sharded, check_model
from tests.cluster.nets import (
    NETS,
    OPTIMIZERS,
    Clipped,
    Decoder,
    accuracy,
    adamw,
    bound,
    forwards,
    go,
    held,
    net,
    quickly,
    worker,
)
from tests.cluster.oracle import (
    BOUND,
    CLASSES,
    FEATURES,
    data,
    difference,
    global_rows,
    mlp,
    momentum,
    one_process,
    train,
)
from tests.cluster.small import check_usable

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

TWENTY = 20


@pytest.fixture(scope="module", params=[2, 4])
def cluster(request: pytest.FixtureRequest) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(request.param, threads=1) as started:
        yield started


@pytest.fixture(params=[1, 2], ids=["all", "replicas"])
def replicas(request: pytest.FixtureRequest, cluster: dtkit.Cluster) -> int:
    return int(request.param)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETS)
def test_twenty_steps_equal_one_process(cluster: dtkit.Cluster, replicas: int, name: str, optimizer: str):
    make = OPTIMIZERS[optimizer]
    run = train(cluster, net(name), strategy=Sharded(replicas), optimizer=make, shuffle="global", steps=TWENTY)
    expected = one_process(net(name), global_rows, optimizer=make, steps=TWENTY)
    assert difference(run.model.state_dict(), expected) <= bound(name, optimizer)
    assert run.history.column("samples").min() == 0  # a rank without a sample took part
    assert run.history.totals()["samples"].min() == 1


@pytest.mark.parametrize("options", [{"clip_norm": 0.2}, {"accumulate": 3}, {"accumulate": 3, "clip_norm": 0.2}])
def test_options_equal_one_process(cluster: dtkit.Cluster, replicas: int, options: dict[str, Any]):
    limit = options.get("clip_norm")
    run = train(cluster, mlp(), strategy=Sharded(replicas, **options), shuffle="global", steps=TWENTY)
    reference = momentum if limit is None else Clipped(momentum, limit)
    assert (
        difference(run.model.state_dict(), one_process(mlp(), global_rows, optimizer=reference, steps=TWENTY)) <= BOUND
    )
    assert forwards(run) == [options.get("accumulate", 1)] * cluster.world_size
    if limit is not None:
        assert (run.history.column("grad_norm") > limit).any()


def test_a_loss_as_a_pair(cluster: dtkit.Cluster, replicas: int):
    weights = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(output, target, weight=weights, reduction="sum"), weights[target].sum()

    def whole(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, weight=weights)

    strategy = Sharded(replicas, accumulate=2)
    run = train(cluster, mlp(), shuffle="global", loss=pair, strategy=strategy, steps=TWENTY)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, whole, steps=TWENTY)) <= BOUND


def test_unequal_shards_and_verify(cluster: dtkit.Cluster, replicas: int):
    part = cluster.partition(data(), weights=[1 + 2 * rank for rank in range(cluster.world_size)])
    run = train(cluster, net("decoder"), part, strategy=Sharded(replicas), steps=TWENTY)
    found = run.verify(steps=TWENTY)
    assert found.verdict == "PASS"
    assert found.difference <= BOUND


class Scaled(nn.Module):
    """A parameter without a dimension, one that is frozen, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first, self.second = nn.Linear(FEATURES, 1), nn.Linear(1, CLASSES)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x) * self.scale))


@pytest.mark.parametrize("make", [Scaled, lambda: Decoder(tied=True)], ids=["scalar", "tied"])
def test_parameters_of_an_unusual_kind(cluster: dtkit.Cluster, replicas: int, make: Any):
    run = train(cluster, net(make), strategy=Sharded(replicas), shuffle="global", steps=TWENTY)
    expected = one_process(net(make), global_rows, steps=TWENTY)
    assert difference(run.model.state_dict(), expected) <= BOUND


def test_each_rank_holds_its_part_only(cluster: dtkit.Cluster, replicas: int):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
    ).double()
    whole = sum(p.nbytes for p in model.parameters())
    run = train(cluster, model, strategy=Sharded(replicas), optimizer=adamw, steps=3)
    parameters, state = zip(*cluster.run(held), strict=True)
    shards = cluster.world_size // replicas
    assert sum(parameters) == whole * replicas
    assert max(parameters) <= 1.1 * whole / shards
    assert max(state) <= 2.2 * whole / shards
    assert run.verify(steps=2)


def test_evaluate_pause_and_a_new_learning_rate(cluster: dtkit.Cluster, replicas: int):
    inputs, targets = data()
    run = train(
        cluster,
        net("encoder"),
        strategy=Sharded(replicas),
        metrics={"accuracy": accuracy},
        shuffle="global",
        start=False,
    )
    run.step(3)
    run.set(lr=0.02)
    run.step(2)
    model = run.model
    found = run.evaluate((inputs, targets))
    with torch.no_grad():
        output = model.eval()(inputs)
    assert found.values["loss"] == pytest.approx(F.cross_entropy(output, targets).item(), abs=1e-12)
    assert found.values["accuracy"] == pytest.approx(accuracy(output, targets).item(), abs=1e-12)
    assert run.lr == 0.02
    go(run)
    assert run.status.step == run.spec.steps
    assert set(run.history.column("lr")) == {0.1, 0.02}


def test_a_group_formed_anew_changes_nothing(cluster: dtkit.Cluster, replicas: int):
    """A call that fails on one rank breaks the group up, while a run is paused."""

    def fail() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise LookupError("on purpose")
        dist.barrier()

    run = train(
        cluster,
        net("decoder"),
        strategy=Sharded(replicas),
        optimizer=adamw,
        shuffle="global",
        steps=TWENTY,
        start=False,
    )
    for _ in range(2):
        run.step(4)
        with pytest.raises(dtkit.EngineError, match="on purpose"):
            cluster.run(fail)
    go(run)
    undisturbed = train(
        cluster, net("decoder"), strategy=Sharded(replicas), optimizer=adamw, shuffle="global", steps=TWENTY
    )
    assert difference(run.model.state_dict(), undisturbed.model.state_dict()) == 0.0


class Failing(nn.Module):
    """Raises on rank 1 in the third forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        self.calls += 1
        hidden = self.layers(x)
        if dist.get_rank() == 1 and self.calls == 3:
            raise LookupError("a bad row")
        return hidden


def test_one_rank_that_raises_ends_the_run_and_nothing_else(cluster: dtkit.Cluster, replicas: int):
    run = train(cluster, net(Failing), strategy=Sharded(replicas), start=False)
    with quickly(5), pytest.raises(dtkit.EngineError, match=r"rank 1 .*LookupError: a bad row"):
        go(run)
    assert run.status.step == 2
    assert difference(run.model.state_dict(), one_process(net(Failing), global_rows, steps=0)) > 0
    check_usable(cluster)


class Choosing(nn.Module):
    """Uses one of two layers, by what its first row is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a if x[0, 0] > 0 else self.b)(x)


def test_unused_parameters_are_refused_and_kill_no_engine(cluster: dtkit.Cluster, replicas: int):
    run = train(cluster, net(Choosing), strategy=Sharded(replicas), start=False)
    with quickly(5), pytest.raises(dtkit.EngineError, match=r"got no gradient.*requires_grad_\(False\)"):
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

    with pytest.warns(UserWarning, match="normalises with the statistics"):
        run = train(cluster, net(Normalised), strategy=Sharded(), shuffle="global", steps=12)
    samples = run.history.column("samples").reshape(12, cluster.world_size)
    assert samples.min() == 0
    assert cluster.run(seen) == (samples > 0).sum(0).tolist()


def test_bf16_computes_in_bf16_and_keeps_the_rest(cluster: dtkit.Cluster, replicas: int):
    inputs, targets = data()
    part = cluster.partition((inputs.float(), targets))
    run = train(cluster, mlp().float(), part, strategy=Sharded(replicas, precision="bf16"), steps=TWENTY)
    exact = train(cluster, mlp().float(), part, strategy=Sharded(replicas), steps=TWENTY)
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert 1e-6 < difference(run.model.state_dict(), exact.model.state_dict()) < 0.1


def test_what_is_not_finite_stops_all_ranks_before_the_update(cluster: dtkit.Cluster, replicas: int):
    inputs, targets = data()
    inputs = inputs.clone()
    inputs[60] = float("nan")
    run = train(cluster, mlp(), (inputs, targets), strategy=Sharded(replicas), shuffle=None, start=False)
    with pytest.raises(dtkit.NonFiniteError):
        go(run)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


def test_sizes_that_cannot_be(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"replica 3 x shard .*there are .* ranks"):
        train(cluster, mlp(), strategy=Sharded(replicas=3))
    with pytest.raises(ValueError, match="sparse"):
        check_model(nn.Sequential(nn.Embedding(3, 2, sparse=True)))

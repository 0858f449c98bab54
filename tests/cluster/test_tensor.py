"""Tensor-parallel training on 2 and 4 engines is that of one process, and a plan that is wrong is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

import dtkit
from dtkit.strategies.tensor import TensorParallel
from tests.cluster.nets import (
    OPTIMIZERS,
    Clipped,
    Decoder,
    Encoder,
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
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.cluster

TWENTY = 20
LOOSE = 1e-10


@pytest.fixture(scope="module", params=[2, 4])
def cluster(request: pytest.FixtureRequest) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(request.param, threads=1) as started:
        yield started


@pytest.fixture(params=[1, 2], ids=["one", "replicas"])
def replicas(request: pytest.FixtureRequest, cluster: dtkit.Cluster) -> int:
    """With two replicas on two engines, each is one slice: data parallelism on DTensors."""
    return int(request.param)


def parallel(cluster: dtkit.Cluster, replicas: int, plan: Any = None, **options: Any) -> TensorParallel:
    return TensorParallel(cluster.world_size // replicas, plan, replicas, **options)


def decoder(attention: str) -> Callable[[], nn.Module]:
    return lambda: Decoder(attention)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "encoder": Encoder,
    "decoder": Decoder,
    "decoder by hand": decoder("by hand"),
    "decoder with a mask": decoder("mask"),
    "decoder fused": decoder("fused"),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_equal_one_process(cluster: dtkit.Cluster, replicas: int, name: str, optimizer: str):
    model, make = net(MODELS[name]), OPTIMIZERS[optimizer]
    run = train(cluster, model, strategy=parallel(cluster, replicas), optimizer=make, shuffle="global", steps=TWENTY)
    expected = one_process(model, global_rows, optimizer=make, steps=TWENTY)
    assert difference(run.model.state_dict(), expected) <= bound(name, optimizer)
    assert run.history.totals()["samples"].min() == 1
    assert (run.history.column("samples").min() == 0) == (replicas > 1)  # a replica without a sample
    assert run.verify(steps=3)


PLANS: dict[str, dict[str, Any]] = {
    "by name": {"h.0.mlp.0": "colwise", "h.0.mlp.2": "rowwise"},
    "embedding": {"wte": "gathered", "h.*.q": "gathered"},
    "rows of the embedding": {"wte": "rowwise"},
    "sequence": {"h.*.first": "sequence", "h.*.mlp.0": "colwise", "h.*.mlp.2": "rowwise", "norm": "sequence"},
    "torch's own": {
        "h.*.mlp.0": ColwiseParallel(),
        "h.*.mlp.2": RowwiseParallel(),
        "h.0.proj": RowwiseParallel(input_layouts=Replicate()),
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_equal_one_process(cluster: dtkit.Cluster, replicas: int, name: str):
    strategy = parallel(cluster, replicas, PLANS[name])
    run = train(cluster, net("decoder"), strategy=strategy, shuffle="global", steps=TWENTY)
    assert difference(run.model.state_dict(), one_process(net("decoder"), global_rows, steps=TWENTY)) <= LOOSE


def wide() -> nn.Module:
    """Eight classes, of which the data has three."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 8))


def test_a_loss_from_cut_outputs(cluster: dtkit.Cluster, replicas: int):
    strategy = parallel(cluster, replicas, {"2": "loss"})
    run = train(cluster, net(wide), strategy=strategy, shuffle="global", steps=TWENTY, metrics={"accuracy": accuracy})
    assert difference(run.model.state_dict(), one_process(net(wide), global_rows, steps=TWENTY)) <= LOOSE
    inputs, targets = data()
    with torch.no_grad():
        output = run.model.eval()(inputs)
    found = run.evaluate((inputs, targets)).values
    assert found["accuracy"] == pytest.approx(accuracy(output, targets).item(), abs=1e-12)
    assert found["loss"] == pytest.approx(F.cross_entropy(output, targets).item(), abs=1e-12)


@pytest.mark.parametrize("options", [{"clip_norm": 0.2}, {"accumulate": 3}, {"accumulate": 3, "clip_norm": 0.2}])
def test_options_equal_one_process(cluster: dtkit.Cluster, replicas: int, options: dict[str, Any]):
    limit = options.get("clip_norm")
    strategy = parallel(cluster, replicas, **options)
    run = train(cluster, mlp(), strategy=strategy, shuffle="global", steps=TWENTY)
    reference = momentum if limit is None else Clipped(momentum, limit)
    expected = one_process(mlp(), global_rows, optimizer=reference, steps=TWENTY)
    assert difference(run.model.state_dict(), expected) <= BOUND
    assert forwards(run) == [options.get("accumulate", 1)] * cluster.world_size
    if limit is not None:
        assert (run.history.column("grad_norm") > limit).any()


def test_a_loss_as_a_pair(cluster: dtkit.Cluster, replicas: int):
    weights = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(output, target, weight=weights, reduction="sum"), weights[target].sum()

    def whole(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, weight=weights)

    run = train(cluster, mlp(), shuffle="global", loss=pair, strategy=parallel(cluster, replicas), steps=TWENTY)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, whole, steps=TWENTY)) <= BOUND


def test_each_rank_holds_its_slices(cluster: dtkit.Cluster, replicas: int):
    model = net("decoder")
    strategy = parallel(cluster, replicas)
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=3)
    expected = 8 * sum(row.here for row in strategy.plan_for(model).rows)
    parameters, state = zip(*cluster.run(held), strict=True)
    assert set(parameters) == {expected}
    assert set(state) == {2 * expected}
    assert run.history.totals()["samples"].tolist() == [24, 24, 24]  # told by several ranks, counted once


def test_evaluate_pause_and_a_new_learning_rate(cluster: dtkit.Cluster, replicas: int):
    inputs, targets = data()
    run = train(
        cluster,
        net("encoder"),
        strategy=parallel(cluster, replicas),
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
    assert found.samples == len(inputs)
    assert found.values["loss"] == pytest.approx(F.cross_entropy(output, targets).item(), abs=1e-12)
    assert found.values["accuracy"] == pytest.approx(accuracy(output, targets).item(), abs=1e-12)
    go(run)
    assert set(run.history.column("lr")) == {0.1, 0.02}


def test_a_group_formed_anew_changes_nothing(cluster: dtkit.Cluster, replicas: int):
    """A call that fails on one rank breaks the group up, while a run is paused."""

    def fail() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise LookupError("on purpose")
        dist.barrier()

    how = {"strategy": parallel(cluster, replicas), "optimizer": adamw, "shuffle": "global", "steps": TWENTY}
    run = train(cluster, net("decoder"), start=False, **how)
    for _ in range(2):
        run.step(4)
        with pytest.raises(dtkit.EngineError, match="on purpose"):
            cluster.run(fail)
    go(run)
    undisturbed = train(cluster, net("decoder"), **how)
    assert difference(run.model.state_dict(), undisturbed.model.state_dict()) == 0.0


def test_dropout_draws_alike_on_ranks_that_share_a_replica(cluster: dtkit.Cluster, replicas: int):
    """What every rank holds whole stays equal on all of them."""
    model = net(lambda: Decoder(dropout=0.3))
    train(cluster, model, strategy=parallel(cluster, replicas), optimizer=adamw, steps=TWENTY)
    fingerprints = cluster.run(lambda: worker().fingerprint())
    assert None not in fingerprints
    assert len(set(fingerprints)) == 1


class Failing(nn.Module):
    """Raises on rank 1 in training, in the third forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        self.calls += self.training
        if dist.get_rank() == 1 and self.calls == 3:
            raise LookupError("a bad row")
        return self.layers(x)


def test_one_rank_that_raises_ends_the_run_and_nothing_else(cluster: dtkit.Cluster, replicas: int):
    run = train(cluster, net(Failing), strategy=parallel(cluster, replicas), start=False)
    with quickly(5), pytest.raises(dtkit.EngineError, match=r"rank 1 .*LookupError: a bad row"):
        go(run)
    assert run.status.step == 2
    assert difference(run.model.state_dict(), net(Failing).state_dict()) > 0
    check_usable(cluster)


class Learned(nn.Module):
    """An activation with one parameter between two layers: cut, its gradient would be a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(FEATURES, 8), nn.PReLU(), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"first": "colwise", "second": "rowwise"}, r"computes something else: the gradients of act.weight differ"),
        ({"first": "colwise"}, r"in . slices can't compute .*What follows a colwise layer"),
        ({"second": "rowwise"}, r"in . slices can't compute"),
        ({"first": "colwise", "thrid": "rowwise"}, r"'thrid': no such module"),
        ({"second": "colwise"}, r"3 outputs can't be cut into . equal parts"),
        (None, r"finds nothing in Learned"),
    ],
)
def test_a_plan_that_does_not_hold_is_refused_before_anything_is_trained(
    cluster: dtkit.Cluster, plan: dict[str, str] | None, message: str
):
    with quickly(5), pytest.raises((ValueError, dtkit.EngineError), match=f"(?s){message}"):
        train(cluster, net(Learned), strategy=TensorParallel(cluster.world_size, plan))
    check_usable(cluster)


def test_what_is_not_finite_stops_all_ranks_before_the_update(cluster: dtkit.Cluster, replicas: int):
    inputs, targets = data()
    inputs = inputs.clone()
    inputs[60] = float("nan")
    strategy = parallel(cluster, replicas)
    run = train(cluster, mlp(), (inputs, targets), strategy=strategy, shuffle=None, start=False)
    with pytest.raises(dtkit.NonFiniteError):
        go(run)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


def test_degrees_that_do_not_multiply(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"dp 1 x tp 3 = 3, but there are . ranks"):
        train(cluster, mlp(), strategy=TensorParallel(3))

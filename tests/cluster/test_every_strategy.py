"""The same Run whatever holds the model in parts, and the same end when something goes wrong.

Each strategy alone on two engines, and with two replicas on four. For data parallelism the same stands in
:mod:`tests.cluster.test_run` and :mod:`tests.cluster.test_bad_input`; what all of them compute, in
:mod:`tests.cluster.test_oracle`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit import Pipeline, Sharded, TensorParallel
from tests.support.nets import accuracy, adamw, go, net
from tests.support.oracle import BATCH, BOUND, CLASSES, FEATURES, data, difference, mlp, momentum, train
from tests.support.small import check_usable
from tests.support.waiting import soon

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.strategies.base import Strategy

pytestmark = pytest.mark.cluster

SLICED = [(2, Sharded()), (4, Sharded(replicas=2)), (2, TensorParallel(2)), (4, TensorParallel(2, replicas=2))]
EVERY = [*SLICED, (2, Pipeline(2, 4)), (4, Pipeline(2, 4, replicas=2))]


def each(strategies: Sequence[tuple[int, Strategy]]) -> Any:
    """Parametrise by (engines, strategy)."""
    cases = [pytest.param(world, strategy, id=f"world{world}, {strategy}") for world, strategy in strategies]
    return pytest.mark.parametrize(("cluster", "strategy"), cases, indirect=["cluster"])


@each(EVERY)
def test_the_same_run(cluster: dtkit.Cluster, strategy: Strategy):
    """Pause, step, learning rate, metrics, held-out data, evaluation, verification, the model."""
    inputs, targets = data()
    run = cluster.train(
        net("decoder"),
        (inputs, targets),
        loss=F.cross_entropy,
        optimizer=momentum,
        batch_size=BATCH,
        epochs=3,
        validation=(inputs, targets),
        metrics={"accuracy": accuracy},
        strategy=strategy,
        start=False,
    )
    assert run.step(2) == 2
    run.set(lr=0.05)
    assert run.lr == 0.05
    go(run)
    assert run.status.step == run.spec.steps == 18
    assert sorted(set(run.history.column("lr"))) == [0.05, 0.1]
    assert [e.samples for e in run.history.evaluations] == [len(inputs)] * 3
    losses = run.history.loss()[1]
    assert len(losses) == 18
    assert not torch.tensor(losses).isnan().any()
    check_evaluation(run)
    found = run.verify(steps=10)
    assert found.verdict == "PASS"
    assert found.max_difference <= BOUND


def check_evaluation(run: dtkit.Run) -> None:
    """What the engines say of held-out rows is what the model in the notebook says."""
    inputs, targets = data()
    found = run.evaluate((inputs, targets))
    with torch.no_grad():
        output = run.model.eval()(inputs)
    assert found.samples == len(inputs)
    assert found.values["loss"] == pytest.approx(F.cross_entropy(output, targets).item(), abs=1e-12)
    assert found.values["accuracy"] == pytest.approx(accuracy(output, targets).item(), abs=1e-12)


@each(EVERY)
def test_a_group_formed_anew_changes_nothing(cluster: dtkit.Cluster, strategy: Strategy):
    """A call that fails on one rank breaks the group up, while a run is paused: twice, as it moves then again."""

    def fail() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise LookupError("on purpose")
        dist.barrier()

    how: dict[str, Any] = {"strategy": strategy, "optimizer": adamw, "shuffle": "global", "steps": 8}
    run = train(cluster, net("decoder"), start=False, **how)
    for _ in range(2):
        run.step(3)
        with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
            cluster.run(fail)
    go(run)
    undisturbed = train(cluster, net("decoder"), **how)
    assert difference(run.model.state_dict(), undisturbed.model.state_dict()) == 0.0


@each(EVERY)
def test_what_is_not_finite_stops_all_ranks_before_the_update(cluster: dtkit.Cluster, strategy: Strategy):
    inputs, targets = data()
    inputs = inputs.clone()
    inputs[60] = float("nan")
    run = train(cluster, mlp(), (inputs, targets), strategy=strategy, shuffle=None, start=False)
    with pytest.raises(dtkit.errors.NonFiniteError):
        go(run)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


class Failing(nn.Module):
    """Raises on rank 1 in training, in the third forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        self.calls += self.training
        hidden = self.layers(x)
        if dist.get_rank() == 1 and self.calls == 3:
            raise LookupError("a bad row")
        return hidden


@each(SLICED)
def test_one_rank_that_raises_ends_the_run_and_nothing_else(cluster: dtkit.Cluster, strategy: Strategy):
    """In a pipeline a layer is on one rank anyway: see :mod:`tests.cluster.test_pipeline`."""
    run = train(cluster, net(Failing), strategy=strategy, start=False)
    with soon(), pytest.raises(dtkit.errors.EngineError, match=r"rank 1 .*LookupError: a bad row"):
        go(run)
    assert run.status.step == 2
    assert difference(run.model.state_dict(), net(Failing).state_dict()) > 0
    check_usable(cluster)


def left() -> int:
    """On an engine: bytes that it may still allocate."""
    from dtkit.engine.memory_limit import compute_data_left

    found = compute_data_left()
    assert found is not None
    return found


@pytest.mark.parametrize("engines", [2, 4])
def test_a_model_that_no_engine_can_hold_is_refused_and_then_trained_in_parts(engines: int):
    """27 million parameters: 432 MB with gradients and AdamW's state, on engines of 420 MB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(12)), nn.Linear(1500, 3))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    rows = torch.randn(64, 1500), torch.randint(3, (64,))
    how: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "batch_size": 32,
        "steps": 3,
    }
    with dtkit.Cluster(engines, memory_limit="420MB") as cluster:
        refused = r"does not fit rank \d with DataParallel.*These would fit: Sharded.*Pipeline"
        with pytest.raises(ValueError, match=refused):
            cluster.train(model, rows, **how)
        for strategy in (Pipeline(engines, 2 * engines, balance_by="parameters"), Sharded()):
            run = cluster.train(model, rows, strategy=strategy, **how)
            run.wait(60)
            assert min(cluster.run(left)) > 0
            assert all(row.peak < row.limit for row in run.memory().rows)
            found = run.model.state_dict()
            assert found.keys() == start.keys()
            assert any(not torch.equal(found[name], value) for name, value in start.items())

"""Runs with strategies that divide the model: the same commands, and the same outcome of errors.

Each strategy runs alone on two engines, and with two replicas on four. Data parallelism has the same tests in
:mod:`tests.cluster.test_run` and :mod:`tests.cluster.test_bad_input`. Results of training are compared in
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
from tests.support.marks import slow
from tests.support.nets import accuracy, adamw, make_net, resume_and_wait
from tests.support.oracle import BATCH, BOUND, CLASSES, FEATURES, data, max_difference, mlp, momentum, train
from tests.support.small import check_usable
from tests.support.waiting import ends_soon

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.strategies.base import Strategy

pytestmark = pytest.mark.cluster

WITHOUT_PIPELINE = [
    (2, Sharded()),
    (4, Sharded(replicas=2)),
    (2, TensorParallel(2)),
    (4, TensorParallel(2, replicas=2)),
]
ALL_STRATEGIES = [*WITHOUT_PIPELINE, (2, Pipeline(2, 4)), (4, Pipeline(2, 4, replicas=2))]


def for_each(strategies: Sequence[tuple[int, Strategy]]) -> Any:
    """Return a parametrize mark over (engines, strategy)."""
    cases = [pytest.param(world, strategy, id=f"world{world}, {strategy}") for world, strategy in strategies]
    return pytest.mark.parametrize(("cluster", "strategy"), cases, indirect=["cluster"])


@for_each(ALL_STRATEGIES)
def test_run_commands_work_with_every_strategy(cluster: dtkit.Cluster, strategy: Strategy):
    """Commands: pause, step, learning rate, metrics, validation, evaluation, verification, the model."""
    inputs, targets = data()
    run = cluster.train(
        make_net("decoder"),
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
    resume_and_wait(run)
    assert run.status.step == run.spec.steps == 18
    assert sorted(set(run.history.column("lr"))) == [0.05, 0.1]
    assert [e.samples for e in run.history.evaluations] == [len(inputs)] * 3
    losses = run.history.loss()[1]
    assert len(losses) == 18
    assert not torch.tensor(losses).isnan().any()
    check_evaluation(run)
    verification = run.verify(steps=10)
    assert verification.verdict == "PASS"
    assert verification.max_difference <= BOUND


def check_evaluation(run: dtkit.Run) -> None:
    """Check that evaluation on the engines equals that of the model in the notebook."""
    inputs, targets = data()
    evaluation = run.evaluate((inputs, targets))
    with torch.no_grad():
        output = run.model.eval()(inputs)
    assert evaluation.samples == len(inputs)
    assert evaluation.values["loss"] == pytest.approx(F.cross_entropy(output, targets).item(), abs=1e-12)
    assert evaluation.values["accuracy"] == pytest.approx(accuracy(output, targets).item(), abs=1e-12)


@for_each(ALL_STRATEGIES)
def test_forming_the_group_again_does_not_change_training(cluster: dtkit.Cluster, strategy: Strategy):
    """A failing call next to a paused run breaks the group, twice, since the parameters are moved each time."""

    def fail() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise LookupError("on purpose")
        dist.barrier()

    options: dict[str, Any] = {"strategy": strategy, "optimizer": adamw, "shuffle": "global", "steps": 8}
    run = train(cluster, make_net("decoder"), start=False, **options)
    for _ in range(2):
        run.step(3)
        with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
            cluster.run(fail)
    resume_and_wait(run)
    undisturbed = train(cluster, make_net("decoder"), **options)
    assert max_difference(run.model.state_dict(), undisturbed.model.state_dict()) == 0.0


@for_each(ALL_STRATEGIES)
def test_nonfinite_values_stop_all_ranks_before_the_update(cluster: dtkit.Cluster, strategy: Strategy):
    inputs, targets = data()
    inputs = inputs.clone()
    inputs[60] = float("nan")
    rows = lambda: (inputs, targets)  # noqa: E731 - which the notebook can't search, as it would an array
    run = train(cluster, mlp(), rows, strategy=strategy, shuffle=None, start=False)
    with pytest.raises(dtkit.errors.NonFiniteError):
        resume_and_wait(run)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


class FailingNet(nn.Module):
    """Model that raises on rank 1, in the third forward pass of training."""

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


@for_each(WITHOUT_PIPELINE)
def test_error_on_one_rank_ends_only_the_run(cluster: dtkit.Cluster, strategy: Strategy):
    """For pipelines see :mod:`tests.cluster.test_pipeline`."""
    run = train(cluster, make_net(FailingNet), strategy=strategy, start=False)
    with ends_soon(), pytest.raises(dtkit.errors.EngineError, match=r"rank 1 .*LookupError: a bad row"):
        resume_and_wait(run)
    assert run.status.step == 2
    assert max_difference(run.model.state_dict(), make_net(FailingNet).state_dict()) > 0
    check_usable(cluster)


def get_free_bytes() -> int:
    """Return the bytes that this engine may still allocate."""
    from dtkit.engine.memory_limit import compute_data_left

    free_bytes = compute_data_left()
    assert free_bytes is not None
    return free_bytes


@pytest.mark.slow
@pytest.mark.parametrize("engines", [2, slow(4)])
def test_model_too_large_for_one_engine_trains_when_split(engines: int):
    """27 million parameters: 432 MB with gradients and AdamW's state, on engines of 420 MB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(12)), nn.Linear(1500, 3))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    rows = torch.randn(64, 1500), torch.randint(3, (64,))
    options: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "batch_size": 32,
        "steps": 3,
    }
    with dtkit.Cluster(engines, memory_limit="420MB") as cluster:
        message = r"does not fit rank \d with DataParallel.*These would fit: Sharded.*Pipeline"
        with pytest.raises(ValueError, match=message):
            cluster.train(model, rows, **options)
        for strategy in (Pipeline(engines, 2 * engines, balance_by="parameters"), Sharded()):
            run = cluster.train(model, rows, strategy=strategy, **options)
            run.wait(60)
            assert min(cluster.run(get_free_bytes)) > 0
            assert all(row.peak < row.limit for row in run.memory().rows)
            state = run.model.state_dict()
            assert state.keys() == start.keys()
            assert any(not torch.equal(state[name], value) for name, value in start.items())

"""Callbacks on the engines: after each step on every rank, with state in checkpoints, under every strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dtkit
from tests.support import small
from tests.support.marks import slow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

DECAY, STEPS = 0.7, 6
STRATEGIES = {
    "data": dtkit.DataParallel(),
    "sharded": dtkit.Sharded(),
    "pipeline": dtkit.Pipeline(2, 2),
    "tensor": dtkit.TensorParallel(2, plan={"0": "colwise", "2": "rowwise"}),
}


def train(cluster: dtkit.Cluster, average: dtkit.EngineCallback, **options: Any) -> dtkit.Run:
    run = start(cluster, on_engine=[average], **options)
    run.wait(60)
    return run


def start(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    x, y = small.data()
    return small.train(cluster, small.net().double(), (x.double(), y), shuffle="global", **options)


def average_step_by_step(cluster: dtkit.Cluster) -> dict[str, torch.Tensor]:
    """Return the average of the models after each step, computed in the notebook."""
    average = {name: p.clone() for name, p in small.net().double().state_dict().items()}
    run = start(cluster, steps=STEPS, start=False)
    for _ in range(STEPS):
        run.step()
        for name, p in run.model.state_dict().items():
            average[name].lerp_(p, 1 - DECAY)
    run.stop()
    return average


@pytest.mark.parametrize("name", ["data", "sharded", slow("pipeline"), slow("tensor")])
def test_moving_average_is_that_of_the_whole_model(cluster2: dtkit.Cluster, name: str):
    average = dtkit.ExponentialMovingAverage(DECAY)
    run = train(cluster2, average, strategy=STRATEGIES[name], steps=STEPS)
    trained = {key: value.clone() for key, value in run.model.state_dict().items()}
    averaged = average.build_model(run).state_dict()
    expected = average_step_by_step(cluster2)
    for key, value in expected.items():
        torch.testing.assert_close(averaged[key], value, rtol=0, atol=1e-12)
        assert not torch.equal(averaged[key], trained[key])
    with pytest.raises(ValueError, match=r"ExponentialMovingAverage\(0\.5\) is not among .* on_engine= had"):
        dtkit.ExponentialMovingAverage(0.5).build_model(run)


@pytest.mark.parametrize(
    ("first", "second"), [("data", "sharded"), slow("pipeline", "pipeline"), slow("tensor", "data")]
)
def test_moving_average_continues_from_a_checkpoint(cluster2: dtkit.Cluster, tmp_path: Path, first: str, second: str):
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 3}
    train(cluster2, dtkit.ExponentialMovingAverage(DECAY), strategy=STRATEGIES[first], steps=3, **options)
    average, whole = dtkit.ExponentialMovingAverage(DECAY), dtkit.ExponentialMovingAverage(DECAY)
    resumed = train(cluster2, average, strategy=STRATEGIES[second], steps=STEPS, resume_from=tmp_path, **options)
    averaged = average.build_model(resumed).state_dict()
    expected = whole.build_model(train(cluster2, whole, steps=STEPS)).state_dict()
    for key, value in averaged.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-12)


class CountSteps(dtkit.EngineCallback):
    """Halves the learning rate at step 3, and counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self, context: Any) -> None:
        self.count += 1
        dtkit.log(counted=self.count)
        if context.step == 3:
            for group in context.optimizer.param_groups:
                group["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


@pytest.mark.slow
def test_own_callback_changes_the_optimizer_and_keeps_its_state_through_a_repair():
    with dtkit.Cluster(2, threads=1) as cluster:
        run = small.train(cluster, on_engine=[CountSteps()], steps=8, start=False)
        run.step(5)
        run.inject_fault("kill", 1)
        run.resume()
        run.wait(90)
        assert run.history.column("lr").tolist() == [0.1] * 6 + [0.05] * 10
        assert run.history.scalar("counted")[1].tolist() == list(range(1, 9))


class Unfreeze(dtkit.EngineCallback):
    def after_step(self, context: Any) -> None:
        if context.step == 3:
            context.model.requires_grad_(True)


def optimize_all(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unfreeze_in_step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    model.requires_grad_(True)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("data", {"on_engine": [Unfreeze()]}),
        ("data", {"loss": None, "training_step": unfreeze_in_step}),
        slow("sharded", {"on_engine": [Unfreeze()]}),
        slow("pipeline", {"on_engine": [Unfreeze()]}),
        slow("tensor", {"on_engine": [Unfreeze()]}),
    ],
)
def test_parameter_that_is_unfrozen_later_is_refused(cluster2: dtkit.Cluster, strategy: str, options: dict[str, Any]):
    """Ranks would train it on their own samples alone."""
    model = small.net()
    model[0].requires_grad_(False)
    run = small.train(cluster2, model, optimizer=optimize_all, strategy=STRATEGIES[strategy], steps=8, **options)
    with pytest.raises(dtkit.errors.EngineError, match=r"0\.weight and 1 more was frozen when the training began"):
        run.wait(60)
    small.check_usable(cluster2)


class Failing(dtkit.EngineCallback):
    def after_step(self, context: Any) -> None:
        if context.step == 2 and context.rank == 1:
            raise ValueError("in after_step")


def test_failing_callback_fails_the_run_with_its_line(cluster2: dtkit.Cluster):
    run = small.train(cluster2, on_engine=[Failing()])
    with pytest.raises(dtkit.errors.EngineError, match="ValueError: in after_step") as caught:
        run.wait(60)
    assert caught.value.cause.rank == 1
    small.check_usable(cluster2)


def test_callback_of_another_kind_is_refused(cluster2: dtkit.Cluster):
    with pytest.raises(TypeError, match=r"on_engine has .*; each must be a dtkit\.EngineCallback"):
        small.train(cluster2, on_engine=[print])


class CheckOptimized(dtkit.EngineCallback):
    """Callback that raises if the optimizer updates parameters of another model."""

    def after_step(self, context: Any) -> None:
        optimized = {id(p) for group in context.optimizer.param_groups for p in group["params"]}
        assert optimized == {id(p) for p in context.model.parameters()}


def fail_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        raise LookupError("on purpose")
    torch.distributed.barrier()


@pytest.mark.parametrize("name", ["sharded", slow("tensor")])
def test_callback_has_the_model_that_is_updated_after_the_group_is_formed_again(cluster2: dtkit.Cluster, name: str):
    run = start(cluster2, on_engine=[CheckOptimized()], strategy=STRATEGIES[name], steps=STEPS, start=False)
    run.step(2)
    with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
        cluster2.run(fail_on_rank_1)
    run.resume()
    run.wait(60)
    assert run.status.step == STEPS

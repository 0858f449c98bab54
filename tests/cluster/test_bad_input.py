"""User errors: messages with the value, the rule and the remedy, and a cluster that stays usable."""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.support.marks import slow
from tests.support.small import check_usable, data, net, sgd, train
from tests.support.waiting import ends_soon

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


class FailsOnRankOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise RuntimeError("no forward here")
        return self.line(x)


class PartlyUsed(nn.Module):
    """Model with a layer that some ranks don't use."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.line, self.spare, self.ranks = nn.Linear(4, 3), nn.Linear(3, 3), ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.line(x)
        return out if dist.get_rank() in self.ranks else self.spare(out)


def make_batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # name -> (arguments of train, the error, a pattern of its message)
    "an optimizer of other parameters": (
        {"optimizer": lambda _: torch.optim.SGD(net().parameters(), lr=1)},
        dtkit.errors.FirstBatchError,
        "not all of them the model's",
    ),
    "an optimizer without parameters": (
        {"optimizer": lambda _: torch.optim.SGD([], lr=1)},
        dtkit.errors.FirstBatchError,
        "empty parameter list",
    ),
    "no optimizer at all": (
        {"optimizer": lambda _: None},
        dtkit.errors.FirstBatchError,
        "returned NoneType; it must return",
    ),
    "one sample for a BatchNorm1d": (
        {"model": make_batch_norm_net(), "batch_size": 21},
        dtkit.errors.EngineError,
        r"1 \(BatchNorm1d\) can't normalize one sample, and step 3 .*Use drop_last=True, .* or choose a batch_size",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_train_refuses_bad_arguments(cluster2: dtkit.Cluster, name: str):
    options, kind, message = BAD[name]
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        train(cluster2, **options)
    assert cluster2.current_run is None or cluster2.current_run.status.state.has_ended
    check_usable(cluster2)


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    # name -> (arguments of train, a pattern of the error's message)
    "a loss that isn't a scalar": (
        {"loss": lambda out, y: F.cross_entropy(out, y, reduction="none")},
        r"loss returned a tensor of shape \(8,\); it must return a scalar tensor.*Use reduction='mean'",
    ),
    "a loss that isn't a tensor": ({"loss": lambda out, y: 1.0}, "loss returned float; it must return a scalar"),
    "a forward that fails on one rank": (
        {"model": FailsOnRankOne()},
        "rank 1 on .*step 0: RuntimeError: no forward here",
    ),
    "a model of another shape": ({"model": nn.Linear(5, 3)}, "mat1 and mat2 shapes cannot be multiplied"),
}


@pytest.mark.parametrize("name", FAILING)
def test_run_fails_in_the_first_step_with_the_engines_traceback(cluster2: dtkit.Cluster, name: str):
    options, message = FAILING[name]
    run = train(cluster2, rows=data, **options)  # loaded by the engines: the notebook has no rows to try
    with pytest.raises(dtkit.errors.EngineError, match=re.compile(message, re.DOTALL)) as caught:
        run.wait(60)
    assert run.status.state is dtkit.types.State.FAILED
    assert "Traceback of rank" in caught.value.full
    assert run.exception is caught.value
    check_usable(cluster2)


@pytest.mark.parametrize("ranks", [slow((0,)), (1,), slow((0, 1))])
def test_unused_layer_is_named_in_the_first_step(cluster2: dtkit.Cluster, ranks: tuple[int, ...]):
    """torch raises an error only in the next step, so the other rank would wait until then."""
    run = train(cluster2, PartlyUsed(*ranks), start=False)
    before = run.model.state_dict()
    message = r"spare.weight, spare.bias got no gradient.*DataParallel\(find_unused_parameters=True\), or call"
    with pytest.raises(dtkit.errors.EngineError, match=message) as caught:
        run.step()
    assert run.exception is caught.value
    assert [f.rank for f in caught.value.failures if not f.victim] == list(ranks)
    assert caught.value.cause.step == 0
    assert len(run.history) == 0
    after = run.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    run = train(cluster2, PartlyUsed(*ranks), strategy=dtkit.DataParallel(find_unused_parameters=True))
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


def test_error_names_the_failed_rank_and_summarizes_the_other(cluster2: dtkit.Cluster):
    run = train(cluster2, FailsOnRankOne())
    with pytest.raises(dtkit.errors.EngineError) as caught:
        run.wait(60)
    assert caught.value.cause.rank == 1
    assert "rank 0 only lost its peer" in str(caught.value)


STRATEGIES = [dtkit.DataParallel(), slow(dtkit.Sharded()), slow(dtkit.TensorParallel(2)), dtkit.Pipeline(2, 4)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_cluster_survives_a_rank_that_fails_to_build_its_job(cluster2: dtkit.Cluster, strategy: Any):
    """Ranks that have the job form the group again, and must not wait for the rank that doesn't."""

    def fail_on_rank_1(parameters: Any) -> torch.optim.Optimizer:
        if dist.get_rank() == 1:
            raise ValueError("no optimizer here")
        return sgd(parameters)

    train(cluster2, strategy=strategy, steps=2).wait(
        60
    )  # forms the groups of the mesh, so that building a job has no collective
    for _ in range(2):  # the second time in a new group, without groups of the mesh
        with ends_soon(), pytest.raises(dtkit.errors.EngineError, match=r"rank 1 .*no optimizer here"):
            train(cluster2, strategy=strategy, optimizer=fail_on_rank_1)
    check_usable(cluster2)


class FlagLoss:
    """Loss in which rank 1 stops once one file exists, and raises once another one exists."""

    def __init__(self, folder: Path) -> None:
        self.stop, self.fail = folder / "stop", folder / "fail"

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1 and self.stop.exists():
            pause = threading.Event()
            while not self.fail.exists():
                pause.wait(0.01)
            raise LookupError("a bad row")
        return F.cross_entropy(output, target)


def list_blocked(cluster: dtkit.Cluster) -> list[bool]:
    """Return for each rank whether it waits in a collective."""
    return [rank.status is not None and rank.status.is_blocked for rank in cluster.stacks().ranks]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [4], indirect=True)
@pytest.mark.parametrize(
    "strategy",
    [slow(dtkit.DataParallel()), dtkit.Sharded(replicas=2), slow(dtkit.TensorParallel(2, replicas=2))],
    ids=repr,
)
def test_ranks_waiting_for_a_failed_rank_are_released_at_once(cluster: dtkit.Cluster, strategy: Any, tmp_path: Path):
    loss = FlagLoss(tmp_path)
    run = train(cluster, loss=loss, strategy=strategy, start=False)
    run.step(2)
    loss.stop.touch()
    run.resume()
    deadline = time.monotonic() + 60
    while list_blocked(cluster) != [True, False, True, True]:
        assert time.monotonic() < deadline, cluster.stacks()
    with ends_soon():
        loss.fail.touch()
        with pytest.raises(dtkit.errors.EngineError, match=r"rank 1 on .*, step 2: LookupError: a bad row") as caught:
            run.wait(60)
        assert len(set(cluster.run(os.getpid))) == 4
    assert {failure.rank: failure.victim for failure in caught.value.failures} == {1: False, 0: True, 2: True, 3: True}
    check_usable(cluster)


def test_keyboard_interrupt_raised_by_user_code_fails_the_run(cluster2: dtkit.Cluster):
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise KeyboardInterrupt("raised by the loss")
        return nn.functional.cross_entropy(output, target)

    run = train(cluster2, loss=loss)
    with pytest.raises(dtkit.errors.EngineError, match=r"rank 1 on .* KeyboardInterrupt: raised by the loss"):
        run.wait(60)
    assert run.status.state is dtkit.types.State.FAILED
    check_usable(cluster2)


def test_optimizer_that_fails_on_one_rank_fails_the_run(cluster2: dtkit.Cluster):
    """The error is between two collectives, so the other rank waits in the next step."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if dist.get_rank() == 0:
                raise RuntimeError("no update here")
            super().step(closure)

    run = train(cluster2, optimizer=lambda p: Broken(p, lr=0.1))
    with pytest.raises(dtkit.errors.EngineError, match=r"rank 0 .*no update here"):
        run.wait(60)
    check_usable(cluster2)


def test_misspelled_keyword_of_an_optimizer_is_named_at_once(cluster2: dtkit.Cluster):
    with pytest.raises(dtkit.errors.FirstBatchError, match=r"SGD has no argument learning_rate=; did you mean lr=\?"):
        train(cluster2, optimizer=lambda params: torch.optim.SGD(params, learning_rate=0.1))  # type: ignore[call-arg]  # the mistake
    check_usable(cluster2)


def test_default_learning_rate_of_an_optimizers_class_is_noted(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=2, optimizer=torch.optim.SGD)
    run.wait(60)
    (text,) = [event.text for event in run.history.events if "optimizer=" in event.text]
    assert text.startswith("optimizer=SGD is the class itself, with its own default, lr=0.001. For another rate: ")


def test_learning_rate_of_zero_is_noted_without_a_scheduler(cluster2: dtkit.Cluster):
    def still(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)

    def find_notes(**options: Any) -> list[str]:
        run = train(cluster2, steps=2, optimizer=still, **options)
        run.wait(60)
        return [event.text for event in run.history.events if "the learning rate is 0" in event.text]

    assert find_notes() == ["the learning rate is 0, so no parameter will change; run.set(lr=...) sets another"]
    warm_up = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: step)
    assert find_notes(lr_scheduler=warm_up) == []

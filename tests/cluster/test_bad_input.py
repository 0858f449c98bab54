"""What a user may get wrong: refused with the value, the rule and the remedy, and the cluster trains on."""

from __future__ import annotations

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
from tests.support.waiting import soon

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


class LeavesOut(nn.Module):
    """Has a layer that some ranks don't use."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.line, self.spare, self.ranks = nn.Linear(4, 3), nn.Linear(3, 3), ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.line(x)
        return out if dist.get_rank() in self.ranks else self.spare(out)


class HoldsALock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)
        self.gate = threading.Lock()

    def gated(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self.gate:
            return F.cross_entropy(output, target)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def cut(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = data()
    return inputs[:rows], targets[:rows]


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # name -> (arguments of train, the error, a pattern of its message)
    "batch_size 0": ({"batch_size": 0}, ValueError, "batch_size=0; it must be at least 1"),
    "a model that can't be sent": ({"model": HoldsALock()}, dtkit.errors.SerializationError, "gate"),
    "an optimiser of other parameters": (
        {"optimizer": lambda _: torch.optim.SGD(net().parameters(), lr=1)},
        dtkit.errors.EngineError,
        "not all of them the model's",
    ),
    "an optimiser without parameters": (
        {"optimizer": lambda _: torch.optim.SGD([], lr=1)},
        dtkit.errors.EngineError,
        "empty parameter list",
    ),
    "no optimiser at all": (
        {"optimizer": lambda _: None},
        dtkit.errors.EngineError,
        "returned NoneType; it must return",
    ),
    "one sample for a BatchNorm1d": (
        {"model": normalised(), "batch_size": 21},
        dtkit.errors.EngineError,
        r"1 \(BatchNorm1d\) can't normalise one sample, and step 3 .*Choose a batch_size",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_at_once(cluster2: dtkit.Cluster, name: str):
    options, kind, message = BAD[name]
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        train(cluster2, **options)
    assert cluster2.current_run is None or cluster2.current_run.status.state.has_ended
    check_usable(cluster2)


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    # name -> (what is given to train, what the run's error says)
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
def test_fails_in_the_first_step_with_the_engine_s_traceback(cluster2: dtkit.Cluster, name: str):
    options, message = FAILING[name]
    run = train(cluster2, **options)
    with pytest.raises(dtkit.errors.EngineError, match=re.compile(message, re.DOTALL)) as caught:
        run.wait(60)
    assert run.status.state is dtkit.types.State.FAILED
    assert "Traceback of rank" in str(caught.value)
    assert run.exception is caught.value
    check_usable(cluster2)


@pytest.mark.parametrize("ranks", [slow((0,)), (1,), slow((0, 1))])
def test_a_layer_that_is_not_used_is_named_in_the_first_step(cluster2: dtkit.Cluster, ranks: tuple[int, ...]):
    """torch would say so a step later, and until then the other rank would wait: in a single step for ever."""
    run = train(cluster2, LeavesOut(*ranks), start=False)
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
    run = train(cluster2, LeavesOut(*ranks), strategy=dtkit.DataParallel(find_unused_parameters=True))
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED


def test_the_rank_that_fails_is_named_and_the_other_folded(cluster2: dtkit.Cluster):
    run = train(cluster2, FailsOnRankOne())
    with pytest.raises(dtkit.errors.EngineError) as caught:
        run.wait(60)
    assert caught.value.cause.rank == 1
    assert "rank 0 only lost its peer" in str(caught.value)


STRATEGIES = [dtkit.DataParallel(), dtkit.Sharded(), dtkit.TensorParallel(2), dtkit.Pipeline(2, 4)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_rank_that_fails_to_build_what_others_have_built(cluster2: dtkit.Cluster, strategy: Any):
    """Those formed the group anew with a job that the failed rank did not have, and waited for it."""

    def fails(parameters: Any) -> torch.optim.Optimizer:
        if dist.get_rank() == 1:
            raise ValueError("no optimiser here")
        return sgd(parameters)

    train(cluster2, strategy=strategy, steps=2).wait(60)  # the groups of its mesh are there: nobody waits in a build
    for _ in range(2):  # and the second time, in a new group, they are not
        with soon(), pytest.raises(dtkit.errors.EngineError, match=r"rank 1 .*no optimiser here"):
            train(cluster2, strategy=strategy, optimizer=fails)
    check_usable(cluster2)


class OnASign:
    """A loss in which rank 1 stops once one file is there, and raises once another is."""

    def __init__(self, folder: Path) -> None:
        self.stop, self.fail = folder / "stop", folder / "fail"

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1 and self.stop.exists():
            pause = threading.Event()
            while not self.fail.exists():
                pause.wait(0.01)
            raise LookupError("a bad row")
        return F.cross_entropy(output, target)


def blocked(cluster: dtkit.Cluster) -> list[bool]:
    """Which ranks wait in a collective."""
    return [seen.status is not None and seen.status.is_blocked for seen in cluster.stacks().ranks]


@pytest.mark.parametrize("cluster", [4], indirect=True)
@pytest.mark.parametrize(
    "strategy",
    [slow(dtkit.DataParallel()), dtkit.Sharded(replicas=2), slow(dtkit.TensorParallel(2, replicas=2))],
    ids=repr,
)
def test_ranks_that_wait_for_one_that_raises_are_out_at_once(cluster: dtkit.Cluster, strategy: Any, tmp_path: Path):
    loss = OnASign(tmp_path)
    run = train(cluster, loss=loss, strategy=strategy, start=False)
    run.step(2)
    loss.stop.touch()
    run.resume()
    deadline = time.monotonic() + 60
    while blocked(cluster) != [True, False, True, True]:
        assert time.monotonic() < deadline, cluster.stacks()
    with soon():
        loss.fail.touch()
        with pytest.raises(dtkit.errors.EngineError, match=r"rank 1 on .*, step 2: LookupError: a bad row") as caught:
            run.wait(60)
        assert len(set(cluster.run(os.getpid))) == 4
    assert {failure.rank: failure.victim for failure in caught.value.failures} == {1: False, 0: True, 2: True, 3: True}
    check_usable(cluster)


def test_an_interrupt_of_the_users_own_making_is_an_error_as_any_other(cluster2: dtkit.Cluster):
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise KeyboardInterrupt("enough of this")
        return nn.functional.cross_entropy(output, target)

    run = train(cluster2, loss=loss)
    with pytest.raises(dtkit.errors.EngineError, match=r"rank 1 on .* KeyboardInterrupt: enough of this"):
        run.wait(60)
    assert run.status.state is dtkit.types.State.FAILED
    check_usable(cluster2)


def test_an_optimiser_that_fails_to_update_on_one_rank(cluster2: dtkit.Cluster):
    """The failure comes between two collectives: the other rank is found waiting in the next step."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if dist.get_rank() == 0:
                raise RuntimeError("no update here")
            super().step(closure)

    run = train(cluster2, optimizer=lambda p: Broken(p, lr=0.1))
    with pytest.raises(dtkit.errors.EngineError, match=r"rank 0 .*no update here"):
        run.wait(60)
    check_usable(cluster2)

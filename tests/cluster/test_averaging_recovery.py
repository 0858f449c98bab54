"""Between two averagings ranks are not equal: after a loss each survivor goes on with what is its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dtkit
from tests.support.marks import slow
from tests.support.oracle import BATCH, SEED, data, mean_loss, mlp
from tests.support.small import check_usable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

EVERY, AT = 4, 10  # two steps after an averaging

Tensors = dict[str, torch.Tensor]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def start(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    how: dict[str, Any] = {"loss": mean_loss, "optimizer": adam, "batch_size": BATCH, "steps": 60, "seed": SEED}
    strategy = dtkit.ParameterAveraging(every=EVERY)
    return cluster.train(mlp(), data(), **{**how, "strategy": strategy, "shuffle": "global", "start": False, **options})


def held() -> tuple[Tensors, Tensors, float]:
    """On an engine: the parameters, the optimiser's means of gradients, and what the rank counts for."""
    from dtkit.engine.session import get_session

    (job,) = get_session()._jobs.values()
    worker: Any = job._worker
    named = dict(worker._model.named_parameters())
    means = {name: worker.optimizer.state[p]["exp_avg"].clone() for name, p in named.items()}
    return {name: p.detach().clone() for name, p in named.items()}, means, worker.averaging_weight


def same(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def mean(parts: list[Tensors], weights: list[float]) -> Tensors:
    total = sum(weights)
    return {
        name: torch.stack([part[name] * (w / total) for part, w in zip(parts, weights, strict=True)]).sum(0)
        for name in parts[0]
    }


def close(one: Tensors, other: Tensors) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=1e-14) for name in one)


@pytest.fixture(scope="module")
def cluster_with_spare() -> Iterator[dtkit.Cluster]:
    """Three engines and a spare, for tests that replace an engine."""
    with dtkit.Cluster(3, threads=1, spares=1) as started:
        yield started


@contextlib.contextmanager
def lend(cluster_with_spare: dtkit.Cluster, engines: int, spares: int) -> Iterator[dtkit.Cluster]:
    """The shared cluster where it has that many engines, a new one otherwise."""
    if (engines, spares) == (3, 1):
        yield cluster_with_spare
        return
    with dtkit.Cluster(engines, threads=1, spares=spares) as started:
        yield started


@pytest.mark.parametrize("engines", [3, slow(4)])
def test_each_survivor_keeps_its_own(cluster_with_spare: dtkit.Cluster, engines: int):
    with lend(cluster_with_spare, engines, spares=1) as cluster:
        run = start(cluster)
        run.step(AT)
        before = cluster.run(held)
        assert not same(before[0][1], before[2][1])
        cluster.kill([1])
        assert cluster.repair() == [1]
        after = cluster.run(held)
        left = [rank for rank in range(engines) if rank != 1]
        for rank in left:
            assert same(after[rank][0], before[rank][0])
            assert same(after[rank][1], before[rank][1])
            assert after[rank][2] == before[rank][2]
        survivors = [before[rank] for rank in left]
        assert close(after[1][0], mean([s[0] for s in survivors], [s[2] for s in survivors]))
        assert close(after[1][1], mean([s[1] for s in survivors], [1.0] * len(left)))
        run.resume()
        run.wait(60)
        assert run.history.totals()["step"].tolist() == list(range(60))
        check_usable(cluster)


@pytest.mark.parametrize("engines", [3, slow(4)])
def test_fewer_go_on_from_the_mean(engines: int):
    """As from a checkpoint on another number of ranks."""
    with dtkit.Cluster(engines, threads=1) as cluster:
        run = start(cluster, on_failure="shrink")
        run.step(AT)
        before = cluster.run(held)
        cluster.kill([1])
        cluster.repair()
        after = cluster.run(held)
        survivors = [one for rank, one in enumerate(before) if rank != 1]
        assert len(after) == len(survivors) == engines - 1
        for parameters, means, _ in after:
            assert close(parameters, mean([s[0] for s in survivors], [s[2] for s in survivors]))
            assert close(means, mean([s[1] for s in survivors], [1.0] * len(survivors)))
        run.resume()
        run.wait(60)
        assert run.status.state is dtkit.types.State.COMPLETED
        check_usable(cluster)


@pytest.mark.parametrize("mode", ["repair", "shrink", "pause"])
@pytest.mark.slow
def test_an_engine_that_is_killed_in_the_midst_costs_one_step_at_most(cluster_with_spare: dtkit.Cluster, mode: str):
    with lend(cluster_with_spare, 3, spares=int(mode != "shrink")) as cluster:
        run = start(cluster, steps=400, start=True, on_failure=mode)
        there = threading.Event()
        end = run.subscribe(lambda: run.status.step >= 30 and there.set())
        assert there.wait(60)
        end()
        os.kill(cluster.nodes[1].pid, signal.SIGKILL)
        if mode == "pause":
            with pytest.raises(dtkit.errors.PausedError, match="rank 1 is gone"):
                run.wait(60)
            run.resume()
        run.wait(60)
        (told,) = (event.text for event in run.history.events if event.kind == "repair")
        assert re.search(r" (no|1) step lost$", told), told
        assert sorted(set(run.history.totals()["step"])) == list(range(400))


BEHIND = 3  # the step that one does not end


class Waiting:
    """A loss in which rank 1 waits, once, until it is interrupted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, output: Any, target: Any) -> Any:
        import torch.distributed as dist

        flag = self.folder / "1"
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == BEHIND and dist.get_rank() == 1 and not flag.exists():
            flag.touch()
            threading.Event().wait(60)
        return mean_loss(output, target)


class Telling(torch.optim.Adam):
    """Says when it has made that step."""

    def __init__(self, parameters: Any, folder: Path) -> None:
        super().__init__(parameters, lr=0.01)
        self.folder, self.updates = folder, 0

    def step(self, closure: Any = None) -> Any:
        import torch.distributed as dist

        found = super().step(closure)
        self.updates += 1
        if self.updates == BEHIND:
            (self.folder / str(dist.get_rank())).touch()
        return found


@pytest.mark.slow
def test_one_that_is_behind_keeps_its_optimiser(tmp_path: Path):
    with dtkit.Cluster(3, threads=1) as cluster:
        run = start(cluster, start=True, loss=Waiting(tmp_path), optimizer=lambda p: Telling(p, tmp_path))
        deadline, pause = time.monotonic() + 30, threading.Event()
        while len(list(tmp_path.iterdir())) < 3:
            assert time.monotonic() < deadline
            pause.wait(0.01)
        run._driver.submit("break").result(60)
        assert run.status.state is dtkit.types.State.PAUSED
        parameters, means, _ = zip(*cluster.run(held), strict=True)
        assert run.status.step == BEHIND
        assert not same(means[1], means[0])
        assert not same(means[1], means[2])
        assert not same(means[1], mean([means[0], means[2]], [1.0, 1.0]))
        assert not same(parameters[0], parameters[2])
        run.resume()
        run.wait(60)
        assert run.status.state is dtkit.types.State.COMPLETED

"""Losses between two averagings, when the ranks differ: each survivor continues with its own parameters."""

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
from tests.support.recovery import wait_for_step
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
    arguments: dict[str, Any] = {"loss": mean_loss, "optimizer": adam, "batch_size": BATCH, "steps": 60, "seed": SEED}
    strategy = dtkit.ParameterAveraging(every=EVERY)
    return cluster.train(
        mlp(), data(), **{**arguments, "strategy": strategy, "shuffle": "global", "start": False, **options}
    )


def get_rank_state() -> tuple[Tensors, Tensors, float]:
    """Return this engine's parameters, Adam's means of gradients, and its weight in the next mean."""
    from dtkit.engine.session import get_session

    (job,) = get_session().state.jobs.values()
    worker: Any = job._worker
    named = dict(worker._model.named_parameters())
    means = {name: worker.optimizer.state[p]["exp_avg"].clone() for name, p in named.items()}
    return {name: p.detach().clone() for name, p in named.items()}, means, worker._averaging_weight


def are_equal(first: Tensors, second: Tensors) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def compute_mean(parts: list[Tensors], weights: list[float]) -> Tensors:
    total = sum(weights)
    return {
        name: torch.stack([part[name] * (w / total) for part, w in zip(parts, weights, strict=True)]).sum(0)
        for name in parts[0]
    }


def are_close(first: Tensors, second: Tensors) -> bool:
    return all(torch.allclose(first[name], second[name], rtol=0, atol=1e-14) for name in first)


@pytest.fixture(scope="module")
def cluster_with_spare() -> Iterator[dtkit.Cluster]:
    """Three engines and a spare, for tests that replace an engine."""
    with dtkit.Cluster(3, threads=1, spares=1) as started:
        yield started


@contextlib.contextmanager
def lend(cluster_with_spare: dtkit.Cluster, engines: int, spares: int) -> Iterator[dtkit.Cluster]:
    """Lend the shared cluster if it has that many engines, or a new one otherwise."""
    if (engines, spares) == (3, 1):
        yield cluster_with_spare
        return
    with dtkit.Cluster(engines, threads=1, spares=spares) as started:
        yield started


@pytest.mark.parametrize("engines", [3, slow(4)])
@pytest.mark.slow
def test_repair_keeps_the_own_parameters_of_each_survivor(cluster_with_spare: dtkit.Cluster, engines: int):
    with lend(cluster_with_spare, engines, spares=1) as cluster:
        run = start(cluster)
        run.step(AT)
        before = cluster.run(get_rank_state)
        assert not are_equal(before[0][1], before[2][1])
        cluster._engine_group.transport.kill([1])
        assert cluster.repair() == [1]
        after = cluster.run(get_rank_state)
        surviving_ranks = [rank for rank in range(engines) if rank != 1]
        for rank in surviving_ranks:
            assert are_equal(after[rank][0], before[rank][0])
            assert are_equal(after[rank][1], before[rank][1])
            assert after[rank][2] == before[rank][2]
        survivors = [before[rank] for rank in surviving_ranks]
        assert are_close(after[1][0], compute_mean([s[0] for s in survivors], [s[2] for s in survivors]))
        assert are_close(after[1][1], compute_mean([s[1] for s in survivors], [1.0] * len(surviving_ranks)))
        run.resume()
        run.wait(60)
        assert run.history.totals()["step"].tolist() == list(range(60))
        check_usable(cluster)


@pytest.mark.parametrize("engines", [3, slow(4)])
@pytest.mark.slow
def test_shrunken_run_continues_from_the_mean(engines: int):
    """The run continues as from a checkpoint on another number of ranks."""
    with dtkit.Cluster(engines, threads=1) as cluster:
        run = start(cluster, on_failure="shrink")
        run.step(AT)
        before = cluster.run(get_rank_state)
        cluster._engine_group.transport.kill([1])
        cluster.repair()
        after = cluster.run(get_rank_state)
        survivors = [state for rank, state in enumerate(before) if rank != 1]
        assert len(after) == len(survivors) == engines - 1
        for parameters, means, _ in after:
            assert are_close(parameters, compute_mean([s[0] for s in survivors], [s[2] for s in survivors]))
            assert are_close(means, compute_mean([s[1] for s in survivors], [1.0] * len(survivors)))
        run.resume()
        run.wait(60)
        assert run.status.state is dtkit.types.State.COMPLETED
        check_usable(cluster)


@pytest.mark.parametrize("mode", ["repair", "shrink", "pause"])
@pytest.mark.slow
def test_engine_killed_during_a_step_costs_at_most_one_step(cluster_with_spare: dtkit.Cluster, mode: str):
    with lend(cluster_with_spare, 3, spares=int(mode != "shrink")) as cluster:
        run = start(cluster, steps=400, start=True, on_failure=mode)
        wait_for_step(run, 30)
        os.kill(cluster.nodes[1].pid, signal.SIGKILL)
        if mode == "pause":
            with pytest.raises(dtkit.errors.PausedError, match="rank 1 is gone"):
                run.wait(60)
            run.resume()
        run.wait(60)
        (text,) = (event.text for event in run.history.events if event.kind == "repair")
        assert re.search(r" (no|1) step lost$", text), text
        assert sorted(set(run.history.totals()["step"])) == list(range(400))


BEHIND = 3  # the step that rank 1 does not end


class WaitingLoss:
    """Loss in which rank 1 waits once, until it is interrupted."""

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


class SignalingAdam(torch.optim.Adam):
    """Optimizer that creates a file when it has made that step."""

    def __init__(self, parameters: Any, folder: Path) -> None:
        super().__init__(parameters, lr=0.01)
        self.folder, self.updates = folder, 0

    def step(self, closure: Any = None) -> Any:
        import torch.distributed as dist

        result = super().step(closure)
        self.updates += 1
        if self.updates == BEHIND:
            (self.folder / str(dist.get_rank())).touch()
        return result


@pytest.mark.slow
def test_rank_that_is_a_step_behind_keeps_its_optimizer(tmp_path: Path):
    with dtkit.Cluster(3, threads=1) as cluster:
        run = start(cluster, start=True, loss=WaitingLoss(tmp_path), optimizer=lambda p: SignalingAdam(p, tmp_path))
        deadline, pause = time.monotonic() + 30, threading.Event()
        while len(list(tmp_path.iterdir())) < 3:
            assert time.monotonic() < deadline
            pause.wait(0.01)
        run._driver.submit("interrupt").result(60)
        assert run.status.state is dtkit.types.State.PAUSED
        parameters, means, _ = zip(*cluster.run(get_rank_state), strict=True)
        assert run.status.step == BEHIND
        assert not are_equal(means[1], means[0])
        assert not are_equal(means[1], means[2])
        assert not are_equal(means[1], compute_mean([means[0], means[2]], [1.0, 1.0]))
        assert not are_equal(parameters[0], parameters[2])
        run.resume()
        run.wait(60)
        assert run.status.state is dtkit.types.State.COMPLETED

"""Elastic scripts for Horovod that lose an engine: it is replaced, or the script goes on with fewer ranks."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from dtkit.errors import EngineError
from dtkit.integrations.horovod.own_group import OwnGroup
from dtkit.rpc.script_ranks import FOLDER_VARIABLE, SLOT_VARIABLE, ScriptFolder
from tests.support.marks import slow
from tests.support.small import check_usable
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import dtkit

pytestmark = pytest.mark.cluster

NUM_ROWS, BATCH, EPOCHS = 36, 2, 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_ROWS, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(NUM_ROWS, 3, generator=generator, dtype=torch.float64)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def end(victim: str, flag: Path) -> None:
    """Kill this process each time that it is started again, or once its engine."""
    if victim == "process":
        os.kill(os.getpid(), signal.SIGKILL)
    elif not flag.exists():
        flag.touch()
        if victim == "engine, connections stay":
            keep_connections_open()
        kill_own_engine()


def kill_own_engine() -> None:
    """Kill this process's engine, and wait until that ends this process: it must not finish the training first."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.alarm(60)
    signal.pause()


def keep_connections_open() -> None:
    """Leave a process that holds this one's connections, so that gloo doesn't notice the end of this one."""
    if os.fork() == 0:
        os.setsid()
        signal.alarm(60)
        signal.pause()


def train(slot_to_lose: int, flag: Path, victim: str = "engine") -> dict[str, Any]:
    """Train with a sampler; at the fourth step the engine or the process of one rank is killed."""
    import horovod.torch as hvd

    hvd.init()
    model, (inputs, targets), sizes = make_model(), make_rows(), []
    optimizer: Any = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(NUM_ROWS), seed=3)

    @hvd.elastic.run
    def train_epochs(state: Any) -> None:
        while state.epoch < EPOCHS:
            indices = list(sampler)
            for first in range(0, len(indices), BATCH):
                if len(state.steps) == 3 and int(os.environ["DTKIT_SCRIPT_SLOT"]) == slot_to_lose:
                    end(victim, flag)
                chosen = indices[first : first + BATCH]
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
                optimizer.step()
                sampler.record_batch(first // BATCH, len(chosen))
                state.steps = [*state.steps, (state.epoch, list(itertools.chain(*hvd.allgather_object(chosen))))]
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=[])
    state.register_reset_callbacks([lambda: sizes.append((hvd.size(), hvd.local_size(), os.environ["WORLD_SIZE"]))])
    train_epochs(state)
    parameters = [p.detach() for p in model.parameters()]
    return {"steps": state.steps, "rank": hvd.rank(), "size": hvd.size(), "resets": sizes, "parameters": parameters}


def train_alone(steps: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
    """Take the same steps in one process, without a fault."""
    model, (inputs, targets) = make_model(), make_rows()
    optimizer = make_optimizer(model)
    for _, chosen in steps:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def check_exact(results: list[dict[str, Any]]) -> None:
    """Check that each epoch took each sample once, and that parameters are those of one process."""
    steps = results[0]["steps"]
    for epoch in range(EPOCHS):
        assert sorted(index for number, chosen in steps if number == epoch for index in chosen) == [*range(NUM_ROWS)]
    expected = train_alone(steps)
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        assert result["size"] == len(results)
        assert result["steps"] == steps
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(result["parameters"], expected, strict=True))


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_lost_engine_of_an_elastic_script_is_replaced(cluster2: dtkit.Cluster, tmp_path: Path, rank: int):
    part = cluster2.partition((torch.arange(10.0)[:, None], torch.zeros(10)))
    results = cluster2.torchrun(train, rank, tmp_path / "flag", horovod=True)
    check_exact(results)
    assert len(results) == 2
    assert (2, 2, "2") in results[1 - rank]["resets"]
    assert part.sizes == (5, 5)
    check_usable(cluster2)


@pytest.mark.parametrize(("rank", "options"), [(0, {"min_np": 2}), slow(2, {"on_failure": "shrink"})])
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_elastic_script_goes_on_with_fewer_ranks(
    cluster: dtkit.Cluster, tmp_path: Path, rank: int, options: dict[str, Any]
):
    results = cluster.torchrun(train, rank, tmp_path / "flag", horovod=True, **options)
    check_exact(results)
    assert len(results) == 2
    assert all(result["resets"] == [(2, 2, "2")] for result in results)
    assert len(results[0]["steps"]) > EPOCHS * NUM_ROWS / (3 * BATCH)
    assert cluster.world_size == 3
    check_usable(cluster)


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_loss_that_gloo_does_not_notice_is_noticed(cluster: dtkit.Cluster, tmp_path: Path):
    results = cluster.torchrun(train, 0, tmp_path / "flag", "engine, connections stay", horovod=True, min_np=2)
    check_exact(results)
    assert len(results) == 2
    check_usable(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_process_that_is_killed_again_and_again_is_left_out(cluster: dtkit.Cluster, tmp_path: Path):
    results = cluster.torchrun(train, 1, tmp_path / "flag", "process", horovod=True, on_failure="shrink")
    check_exact(results)
    assert len(results) == 2
    check_usable(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_engine_beyond_max_np_takes_the_place_of_a_lost_one(cluster: dtkit.Cluster, tmp_path: Path):
    results = cluster.torchrun(train, 0, tmp_path / "flag", horovod=True, min_np=1, max_np=2)
    check_exact(results)
    assert len(results) == 2
    assert all((2, 2, "2") in result["resets"] for result in results[1:])
    check_usable(cluster)


def lose_an_engine_after_the_last_step(path: Path) -> None:
    """Lose rank 1's engine after `elastic.run`, and end rank 0 only when another engine has taken its place."""
    import horovod.torch as hvd

    if (path / "lost").exists():
        (path / "replaced").touch()
    hvd.init()

    @hvd.elastic.run
    def train_nothing(state: Any) -> None:
        state.commit()

    train_nothing(hvd.elastic.ObjectState(epoch=0))
    if hvd.rank() == 1:
        (path / "lost").touch()
        kill_own_engine()
    wait_until((path / "replaced").exists, 60)


def test_rank_that_is_replaced_when_others_have_ended_fails_at_once(cluster2: dtkit.Cluster, tmp_path: Path):
    message = "MeetingError: this rank can't form a group, since rank 0 ended the script before"
    with pytest.raises(EngineError, match=message):
        cluster2.torchrun(lose_an_engine_after_the_last_step, tmp_path, horovod=True)
    check_usable(cluster2)


def lose_an_engine_without_elastic_run() -> None:
    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        kill_own_engine()
    hvd.barrier()


@pytest.mark.slow
def test_loss_of_an_engine_ends_a_script_that_is_not_elastic(cluster2: dtkit.Cluster):
    with pytest.raises(EngineError, match=r"engine of rank 1 is gone.*cluster\.repair\(\)"):
        cluster2.torchrun(lose_an_engine_without_elastic_run, horovod=True, min_np=1)
    assert cluster2.repair() == [1]
    check_usable(cluster2)


# A rank that waits at most three seconds for another one to connect.
IMPATIENT = """
from dtkit.integrations import timeouts
timeouts.HOROVOD_RESET_TIMEOUT_S = 3.0
import dtkit.integrations.horovod.torch as hvd
hvd.init()
hvd.barrier()
print("formed", hvd.rank(), hvd.size())
"""


def start_slot(folder: ScriptFolder, slot: int) -> subprocess.Popen[str]:
    variables = {FOLDER_VARIABLE: str(folder.path), SLOT_VARIABLE: str(slot)}
    return subprocess.Popen(
        [sys.executable, "-c", IMPATIENT], env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_replaced_rank_tries_again_when_another_never_connects(tmp_path: Path):
    folder = ScriptFolder.create(tmp_path / "script", [0, 1])
    folder.elastic_file.touch()
    replaced = start_slot(folder, 0)
    OwnGroup()._meet(folder, 1)  # this rank arrives, and never connects
    successor = start_slot(folder, 1)
    try:
        assert replaced.communicate(timeout=90)[0] == "formed 0 2\n"
        assert successor.communicate(timeout=90)[0] == "formed 1 2\n"
    finally:
        replaced.kill()
        successor.kill()

"""`EarlyStopping(restore_best=True)`: a run ends with the weights of its best epoch, exactly, with every strategy."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support import oracle, small
from tests.support.marks import slow
from tests.support.oracle import BOUND, max_difference

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

EPOCH = 6  # steps
STRATEGIES = {
    "data": dtkit.DataParallel(),
    "sharded": dtkit.Sharded(),
    "pipeline": dtkit.Pipeline(2, 4),
    "tensor": dtkit.TensorParallel(2, plan={"0": "colwise", "2": "rowwise"}),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `checkpoint_dir`, a run keeps its best epoch in "checkpoints" of the notebook's folder."""
    monkeypatch.chdir(tmp_path)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(50, oracle.FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(oracle.CLASSES, (50,), generator=generator)


@dataclasses.dataclass
class Loop:
    """A plain loop in one process, which keeps the best epoch's model and optimizer as Keras does."""

    best: float = float("inf")
    best_epoch: int = 0
    model: Any = None
    optimizer: Any = None

    def train(self, epochs: int, *, patience: int, first: int = 0) -> Loop:
        model = oracle.mlp() if self.model is None else self.model
        optimizer = make_sgd(model.parameters())
        if self.optimizer is not None:
            optimizer.load_state_dict(self.optimizer)
        inputs, targets = oracle.data()
        for epoch in range(first, first + epochs):
            for step in range(epoch * EPOCH, (epoch + 1) * EPOCH):
                rows = torch.from_numpy(oracle.get_global_rows(step))
                optimizer.zero_grad()
                oracle.mean_loss(model(inputs[rows]), targets[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                loss = float(oracle.mean_loss(model(held_out()[0]), held_out()[1]))
            if loss < self.best:
                self.best, self.best_epoch = loss, epoch + 1
                self.model, self.optimizer = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
            elif epoch + 1 - self.best_epoch >= patience:
                break
        return self


def train(cluster: dtkit.Cluster, stopping: dtkit.EarlyStopping | None, **options: Any) -> dtkit.Run:
    callbacks = [] if stopping is None else [stopping]
    arguments = {"validation": held_out(), "shuffle": "global", "callbacks": callbacks, "steps": None}
    arguments |= {"optimizer": make_sgd} | options
    return oracle.train(cluster, oracle.mlp(), **arguments)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("patience", [2, 99])
def test_run_ends_with_the_weights_of_its_best_epoch(cluster2: dtkit.Cluster, tmp_path: Path, name: str, patience: int):
    expected = Loop().train(7, patience=patience)
    stopping = dtkit.EarlyStopping(patience, restore_best=True)
    run = train(cluster2, stopping, epochs=7, strategy=STRATEGIES[name], checkpoint_dir=tmp_path)
    assert (stopping.best_epoch, run.status.state.value) == (
        expected.best_epoch,
        "completed" if patience == 99 else "stopped",
    )
    assert 1 < expected.best_epoch < run.status.step // EPOCH
    assert max_difference(run.model.state_dict(), expected.model.state_dict()) <= BOUND
    assert run.evaluate(held_out())["loss"] == pytest.approx(expected.best, abs=BOUND)
    assert stopping.best_checkpoint is not None
    assert stopping.best_checkpoint.is_relative_to(tmp_path)
    assert dtkit.Checkpoint(stopping.best_checkpoint).step == expected.best_epoch * EPOCH
    assert any("the best, are back" in event.text for event in run.history.events)


def test_run_goes_on_from_the_best_epoch_with_its_optimizer(cluster2: dtkit.Cluster, tmp_path: Path):
    loop = Loop().train(7, patience=99)
    stopping = dtkit.EarlyStopping(99, restore_best=True)
    run = train(cluster2, stopping, epochs=7, checkpoint_dir=tmp_path)
    loop.best = stopping.best = float("inf")  # so that the next epoch is the best
    loop.train(1, patience=99, first=7)
    run.extend(epochs=1)
    run.wait(60)
    assert max_difference(run.model.state_dict(), loop.model.state_dict()) <= BOUND


class Averaged(nn.Module):
    """A model with BatchNorm: its buffers differ between ranks, and the mean depends on their samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        layers = nn.Linear(oracle.FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, oracle.CLASSES)
        self.layers = nn.Sequential(*layers).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics of a batch")
@pytest.mark.parametrize("strategy", [dtkit.ParameterAveraging(every=4), slow(dtkit.DataParallel())], ids=repr)
def test_means_over_ranks_are_those_of_the_best_epoch(cluster2: dtkit.Cluster, tmp_path: Path, strategy: Any):
    options = {
        "validation": held_out(),
        "strategy": strategy,
        "steps": None,
        "shuffle": "shard",
        "optimizer": make_sgd,
        "batch_size": 22,
    }
    stopping = dtkit.EarlyStopping(99, mode="max", restore_best=True)  # the loss is largest at first
    run = oracle.train(cluster2, Averaged(), epochs=7, callbacks=[stopping], checkpoint_dir=tmp_path, **options)
    restored = run.model.state_dict()
    assert stopping.best_epoch < 7
    shorter = oracle.train(cluster2, Averaged(), epochs=stopping.best_epoch, **options)
    assert max_difference(restored, shorter.model.state_dict()) == 0


def test_resumed_run_ends_with_the_best_weights_of_the_first_one(cluster2: dtkit.Cluster, tmp_path: Path):
    expected = Loop().train(7, patience=99)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 5 * EPOCH}
    train(cluster2, dtkit.EarlyStopping(99, restore_best=True), epochs=5, **options)
    assert expected.best_epoch < 5
    stopping = dtkit.EarlyStopping(99, restore_best=True)
    run = train(cluster2, stopping, epochs=7, resume_from=tmp_path)
    assert stopping.best_epoch == expected.best_epoch
    assert max_difference(run.model.state_dict(), expected.model.state_dict()) <= BOUND


def test_loss_of_the_kept_weights_is_noted_when_a_run_is_resumed(cluster2: dtkit.Cluster, tmp_path: Path):
    first = dtkit.EarlyStopping(99, restore_best=True)
    train(cluster2, first, epochs=3, checkpoint_dir=tmp_path / "first", checkpoint_every=3 * EPOCH)
    assert first.best_checkpoint is not None
    first.best_checkpoint.rename(tmp_path / "elsewhere")
    run = train(cluster2, dtkit.EarlyStopping(99, restore_best=True), epochs=4, resume_from=tmp_path / "first")
    assert any("the best so far, are gone" in event.text for event in run.history.events)


def test_steps_that_end_within_an_epoch_are_refused(cluster2: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"20 steps end within one of 6 steps. Train for 24 steps, or for epochs"):
        train(cluster2, dtkit.EarlyStopping(restore_best=True), steps=20)
    with pytest.raises(TypeError, match=r"restore_best='yes'; it must be True or False"):
        dtkit.EarlyStopping(restore_best="yes")  # type: ignore[arg-type]
    small.check_usable(cluster2)

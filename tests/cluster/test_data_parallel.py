"""Data parallelism equals one process: fifty steps of unusual data, losses and models.

The tests run on one engine and on three, which don't divide 121 samples. Tests for all strategies are in
:mod:`tests.cluster.test_oracle`, with 1, 2, 3 and 4 engines for data parallelism.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.support.oracle import (
    BOUND,
    CLASSES,
    FEATURES,
    SAMPLES,
    STEPS,
    data,
    get_global_rows,
    max_difference,
    mlp,
    momentum,
    train,
    train_in_one_process,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("cluster", [1, 3], indirect=True)]


# -- data ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_unequal_shards_train_as_one_process(cluster: dtkit.Cluster):
    part = cluster.partition(data(), weights=[1 + 2 * rank for rank in range(cluster.world_size)])
    run = train(cluster, mlp(), part, shuffle="global")
    assert max_difference(run.model.state_dict(), train_in_one_process(mlp(), get_global_rows)) <= BOUND


def test_verify_replays_shuffled_shards(cluster: dtkit.Cluster):
    """The rows of shuffle="shard" depend on the world size; `verify` replays them in one process."""
    run = train(cluster, mlp(), cluster.partition(data(), seed=3))
    verification = run.verify(steps=STEPS)
    assert verification.verdict == "PASS"
    assert verification.dtype == "float64"
    assert verification.max_difference <= BOUND


class Records(torch.utils.data.Dataset):
    """Dataset of dicts, like tokenized text."""

    def __init__(self) -> None:
        self.inputs, self.targets = data()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": self.inputs[row], "y": self.targets[row]}


def test_custom_training_step_on_dict_batches_trains_as_one_process(cluster: dtkit.Cluster):
    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    part = cluster.partition(Records())
    run = train(cluster, mlp(), part, loss=None, training_step=step, shuffle="global")
    assert max_difference(run.model.state_dict(), train_in_one_process(mlp(), get_global_rows)) <= BOUND


def test_data_loaded_on_each_engine_trains_as_one_process(cluster: dtkit.Cluster):
    run = train(cluster, mlp(), cluster.partition(data), shuffle="global", steps=10)
    assert max_difference(run.model.state_dict(), train_in_one_process(mlp(), get_global_rows, steps=10)) <= BOUND


# -- losses ----------------------------------------------------------------------------------------------------


def test_loss_pair_with_ignored_targets_trains_as_one_process(cluster: dtkit.Cluster):
    def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(output, target, ignore_index=0, reduction="sum"), (target != 0).sum()

    def whole(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # A mean over no row is NaN; the sum over none is 0, as for the pair.
        kept = (target != 0).sum().clamp(min=1)
        return F.cross_entropy(output, target, ignore_index=0, reduction="sum") / kept

    ignored_steps = [step for step in range(STEPS) if (data()[1][torch.from_numpy(get_global_rows(step))] == 0).all()]
    assert ignored_steps  # steps in which every target is ignored
    run = train(cluster, mlp(), shuffle="global", loss=pair)
    assert max_difference(run.model.state_dict(), train_in_one_process(mlp(), get_global_rows, whole)) <= BOUND


def test_learning_rate_schedule_trains_as_one_process(cluster: dtkit.Cluster):
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)

    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        optimizer = momentum(parameters)
        lr_scheduler = schedule(optimizer)
        optimizer.register_step_post_hook(lambda *_: lr_scheduler.step())
        return optimizer

    run = train(cluster, mlp(), shuffle="global", steps=40, lr_scheduler=schedule)
    assert (
        max_difference(
            run.model.state_dict(), train_in_one_process(mlp(), get_global_rows, optimizer=scheduled, steps=40)
        )
        <= BOUND
    )
    rates = run.history.column("lr")
    assert rates.max() == pytest.approx(0.2, rel=0.02)
    assert rates[-1] < rates.max() / 2


def test_extended_run_equals_one_long_run(cluster: dtkit.Cluster):
    """`extend` keeps the optimizer's momentum and the position in the data."""
    run = train(cluster, mlp(), shuffle="global", steps=20)
    run.extend(steps=STEPS - 20)
    run.wait(120)
    assert max_difference(run.model.state_dict(), train_in_one_process(mlp(), get_global_rows)) <= BOUND


# -- models ----------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Model in which each row uses one of two heads, so that a rank may leave a head unused."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(len(x), CLASSES)
        positive = x[:, 0] > 0
        for head, chosen in zip(self.heads, (positive, ~positive), strict=True):
            if chosen.any():
                out[chosen] = head(x[chosen])
        return out


def test_unused_parameters_train_as_one_process(cluster: dtkit.Cluster):
    """Some steps use a head on some ranks only; the last one of an epoch leaves a head unchanged."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    strategy = dtkit.DataParallel(find_unused_parameters=True)
    run = train(cluster, model, strategy=strategy, shuffle="global", batch_size=4, steps=62)
    rows = functools.partial(get_global_rows, batch=4)
    assert len(rows(SAMPLES // 4)) == 1
    assert max_difference(run.model.state_dict(), train_in_one_process(model, rows, steps=62)) <= BOUND


class Words(nn.Module):
    """Model with an embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words((x.abs() * 3).long().clamp(max=9)).mean(1))


def test_sparse_gradients_train_as_one_process(cluster: dtkit.Cluster):
    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    torch.manual_seed(0)
    model = Words().double()
    run = train(cluster, model, optimizer=plain, shuffle="global", steps=12)
    expected = train_in_one_process(model, get_global_rows, optimizer=plain, steps=12)
    assert max_difference(run.model.state_dict(), expected) <= BOUND


class Mixed(nn.Module):
    """Model with parameters of two dtypes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8).double(), nn.Linear(8, CLASSES)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).float())


def test_mixed_dtypes_and_frozen_parameters_train_as_one_process(cluster: dtkit.Cluster):
    torch.manual_seed(0)
    model = Mixed()
    frozen = model.first.bias.clone()
    run = train(cluster, model, shuffle="global", steps=12)
    state = run.model.state_dict()
    assert torch.equal(state["first.bias"], frozen)
    assert state["first.weight"].dtype == torch.float64
    assert max_difference(state, train_in_one_process(model, get_global_rows, steps=12)) <= 1e-5


def test_float32_error_stays_within_its_bound(cluster: dtkit.Cluster):
    inputs, targets = data()
    part = cluster.partition((inputs.float(), targets))
    run = train(cluster, mlp().float(), part)
    assert run.verify(steps=20).max_difference <= 1e-5


# -- timeline ---------------------------------------------------------------------------------------------


def test_data_parallel_run_has_a_timeline(cluster: dtkit.Cluster, tmp_path: Path):
    run = train(cluster, mlp(), steps=3)
    timeline = run.timeline
    assert timeline.ranks == list(range(cluster.world_size))
    assert not timeline.is_pipelined
    expected = {"data", "forward", "backward", "update"} | ({"sync"} if cluster.world_size > 1 else set())
    assert expected <= set(timeline.spans["phase"].tolist())
    assert (timeline.spans["end"] >= timeline.spans["begin"]).all()
    timeline.export_chrome_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 100

"""Data parallelism equals one process whatever the data, the loss and the model are: fifty steps of awkward cases.

On one engine and on three, which divide neither 121 samples nor batches of 24. What all strategies must do stands in
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
    difference,
    global_rows,
    mlp,
    momentum,
    one_process,
    train,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("cluster", [1, 3], indirect=True)]


# -- data ------------------------------------------------------------------------------------------------------


def test_unequal_shards(cluster: dtkit.Cluster):
    part = cluster.partition(data(), weights=[1 + 2 * rank for rank in range(cluster.world_size)])
    run = train(cluster, mlp(), part, shuffle="global")
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows)) <= BOUND


def test_shards_with_the_same_rows(cluster: dtkit.Cluster):
    """shuffle="shard" depends on the world size; `verify` replays its rows in one process."""
    run = train(cluster, mlp(), cluster.partition(data(), seed=3))
    found = run.verify(steps=STEPS)
    assert found.verdict == "PASS"
    assert found.dtype == "float64"
    assert found.max_difference <= BOUND


class Records(torch.utils.data.Dataset):
    """Samples as dicts, as tokenised text has them."""

    def __init__(self) -> None:
        self.inputs, self.targets = data()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": self.inputs[row], "y": self.targets[row]}


def test_a_step_of_the_user_s_own_on_dict_batches(cluster: dtkit.Cluster):
    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    part = cluster.partition(Records())
    run = train(cluster, mlp(), part, loss=None, training_step=step, shuffle="global")
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows)) <= BOUND


def test_data_that_every_engine_loads_itself(cluster: dtkit.Cluster):
    run = train(cluster, mlp(), cluster.partition(data), shuffle="global", steps=10)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, steps=10)) <= BOUND


# -- losses ----------------------------------------------------------------------------------------------------


def test_ignored_targets_as_a_pair(cluster: dtkit.Cluster):
    def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(output, target, ignore_index=0, reduction="sum"), (target != 0).sum()

    def whole(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # The mean over no row at all is NaN where every target is ignored; a sum of nothing is what is meant.
        kept = (target != 0).sum().clamp(min=1)
        return F.cross_entropy(output, target, ignore_index=0, reduction="sum") / kept

    nothing = [step for step in range(STEPS) if (data()[1][torch.from_numpy(global_rows(step))] == 0).all()]
    assert nothing  # a step in which every target is ignored: it must change nothing but the momentum's share
    run = train(cluster, mlp(), shuffle="global", loss=pair)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, whole)) <= BOUND


def test_a_learning_rate_schedule(cluster: dtkit.Cluster):
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)

    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        made = momentum(parameters)
        following = schedule(made)
        made.register_step_post_hook(lambda *_: following.step())
        return made

    run = train(cluster, mlp(), shuffle="global", steps=40, lr_scheduler=schedule)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, optimizer=scheduled, steps=40)) <= BOUND
    rates = run.history.column("lr")
    assert rates.max() == pytest.approx(0.2, rel=0.02)
    assert rates[-1] < rates.max() / 2


def test_training_on_equals_training_longer_in_one_go(cluster: dtkit.Cluster):
    """`extend` keeps the optimiser's momentum and the place in the data."""
    run = train(cluster, mlp(), shuffle="global", steps=20)
    run.extend(steps=STEPS - 20)
    run.wait(120)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows)) <= BOUND


# -- models ----------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Each row goes through one head or the other, so that in a small step a rank leaves a head unused."""

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


def test_unused_parameters(cluster: dtkit.Cluster):
    """In some steps a head is used by some ranks only, in the last of an epoch by none: it then stays as it is."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    strategy = dtkit.DataParallel(find_unused_parameters=True)
    run = train(cluster, model, strategy=strategy, shuffle="global", batch_size=4, steps=62)
    rows = functools.partial(global_rows, batch=4)
    assert len(rows(SAMPLES // 4)) == 1
    assert difference(run.model.state_dict(), one_process(model, rows, steps=62)) <= BOUND


class Words(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words((x.abs() * 3).long().clamp(max=9)).mean(1))


def test_sparse_gradients(cluster: dtkit.Cluster):
    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    torch.manual_seed(0)
    model = Words().double()
    run = train(cluster, model, optimizer=plain, shuffle="global", steps=12)
    expected = one_process(model, global_rows, optimizer=plain, steps=12)
    assert difference(run.model.state_dict(), expected) <= BOUND


class Mixed(nn.Module):
    """Parameters of two dtypes, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8).double(), nn.Linear(8, CLASSES)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).float())


def test_parameters_of_two_dtypes_and_frozen_ones(cluster: dtkit.Cluster):
    torch.manual_seed(0)
    model = Mixed()
    frozen = model.first.bias.clone()
    run = train(cluster, model, shuffle="global", steps=12)
    state = run.model.state_dict()
    assert torch.equal(state["first.bias"], frozen)
    assert state["first.weight"].dtype == torch.float64
    assert difference(state, one_process(model, global_rows, steps=12)) <= 1e-5


def test_float32_stays_within_its_bound(cluster: dtkit.Cluster):
    inputs, targets = data()
    part = cluster.partition((inputs.float(), targets))
    run = train(cluster, mlp().float(), part)
    assert run.verify(steps=20).max_difference <= 1e-5


# -- what it shows ---------------------------------------------------------------------------------------------


def test_it_has_a_timeline_too(cluster: dtkit.Cluster, tmp_path: Path):
    run = train(cluster, mlp(), steps=3)
    timeline = run.timeline
    assert timeline.ranks == list(range(cluster.world_size))
    assert not timeline.is_pipelined
    assert {"data", "forward", "backward", "sync", "update"} <= set(timeline.spans["phase"].tolist())
    assert (timeline.spans["end"] >= timeline.spans["begin"]).all()
    run.timeline.export_chrome_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 100

"""Training on 1 to 4 engines equals training in one process, whatever the data, the loss and the model are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.cluster.oracle import (
    BOUND,
    CLASSES,
    FEATURES,
    SAMPLES,
    SEED,
    STEPS,
    data,
    difference,
    global_rows,
    mean_loss,
    mlp,
    momentum,
    one_process,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def cluster(request: pytest.FixtureRequest) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(request.param, threads=1) as started:
        yield started


def test_fifty_steps_equal_one_process(cluster: dtkit.Cluster):
    run = train(cluster, mlp(), shuffle="global")
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows)) <= BOUND
    # Both awkward cases took place: a last batch of one sample, and (from two ranks on) ranks without any.
    totals = run.history.totals()
    assert totals["samples"].min() == 1
    if cluster.world_size > 1:
        assert run.history.column("samples").min() == 0


def test_the_losses_are_those_of_one_process(cluster: dtkit.Cluster):
    run = train(cluster, mlp(), shuffle="global", steps=12)
    inputs, targets = data()
    model = mlp()
    update = momentum(model.parameters())
    expected = []
    for step in range(12):
        rows = torch.from_numpy(global_rows(step))
        update.zero_grad()
        value = mean_loss(model(inputs[rows]), targets[rows])
        value.backward()
        update.step()
        expected.append(value.item())
    assert np.abs(run.history.loss()[1] - expected).max() <= BOUND


def test_unequal_shards_equal_one_process(cluster: dtkit.Cluster):
    weights = [1 + 2 * rank for rank in range(cluster.world_size)]
    part = cluster.partition(data(), weights=weights)
    run = train(cluster, mlp(), part, shuffle="global")
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows)) <= BOUND


def test_shards_equal_one_process_with_the_same_rows(cluster: dtkit.Cluster):
    """shuffle="shard" depends on the world size; `verify` replays its rows in one process."""
    run = train(cluster, mlp(), cluster.partition(data(), seed=3))
    found = run.verify(steps=STEPS)
    assert found.verdict == "PASS"
    assert found.dtype == "float64"
    assert found.difference <= BOUND


def test_a_loss_with_class_weights_as_a_pair(cluster: dtkit.Cluster):
    weights = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(output, target, weight=weights, reduction="sum"), weights[target].sum()

    def whole(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, weight=weights)

    run = train(cluster, mlp(), shuffle="global", loss=pair)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, whole)) <= BOUND


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


class Attention(nn.Module):
    """A transformer block: its key bias has a true gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x[..., None])
        return self.out((h + self.attend(h, h, h, need_weights=False)[0]).mean(1))


def test_attention_with_adamw(cluster: dtkit.Cluster):
    torch.manual_seed(0)
    model = Attention().double()
    run = train(cluster, model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), shuffle="global", steps=20)
    found = run.verify(steps=20)
    assert found.verdict == "PASS"
    assert found.difference <= 1e-10


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
    run = train(cluster, mlp(), part, loss=None, step=step, shuffle="global")
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows)) <= BOUND


def test_data_that_every_engine_loads_itself(cluster: dtkit.Cluster):
    run = train(cluster, mlp(), cluster.partition(data), shuffle="global", steps=10)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, steps=10)) <= BOUND


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
    per_epoch = -(-SAMPLES // 4)

    def rows(step: int) -> np.ndarray:
        order = np.random.default_rng([SEED, step // per_epoch]).permutation(np.arange(SAMPLES))
        return order[step % per_epoch * 4 :][:4]

    assert len(rows(per_epoch - 1)) == 1
    assert difference(run.model.state_dict(), one_process(model, rows, steps=62)) <= BOUND


def test_a_convolution_with_ranks_that_have_no_sample(cluster: dtkit.Cluster):
    """An empty forward of it would raise in `view`: ranks without a sample must not try."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Conv1d(1, 4, 3)
            self.out = nn.Linear(4 * (FEATURES - 2), CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.filters(x[:, None])).view(len(x), -1))

    torch.manual_seed(0)
    model = Convolution().double()
    run = train(cluster, model, shuffle="global", steps=12)
    assert (run.history.column("samples") == 0).any() == (cluster.world_size > 1)
    assert difference(run.model.state_dict(), one_process(model, global_rows, steps=12)) <= BOUND


def test_an_embedding_with_sparse_gradients(cluster: dtkit.Cluster):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 4, sparse=True)
            self.out = nn.Linear(4, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.words((x.abs() * 3).long().clamp(max=9)).mean(1))

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    torch.manual_seed(0)
    model = Words().double()
    run = train(cluster, model, optimizer=plain, shuffle="global", steps=12)
    expected = one_process(model, global_rows, optimizer=plain, steps=12)
    assert difference(run.model.state_dict(), expected) <= BOUND


def test_parameters_of_two_dtypes_and_frozen_ones(cluster: dtkit.Cluster):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(FEATURES, 8).double(), nn.Linear(8, CLASSES)
            self.first.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)).float())

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
    assert run.verify(steps=20).difference <= 1e-5


def test_training_on_equals_training_longer_in_one_go(cluster: dtkit.Cluster):
    """`extend` keeps the optimiser's momentum and the place in the data."""
    run = train(cluster, mlp(), shuffle="global", steps=20)
    run.extend(steps=STEPS - 20)
    run.wait(120)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows)) <= BOUND

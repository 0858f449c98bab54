"""Values that pipelines send between stages, for typical models; each compared with one process."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.support.marks import slow
from tests.support.nets import WIDTH
from tests.support.oracle import (
    BATCH,
    BOUND,
    CLASSES,
    FEATURES,
    data,
    max_difference,
    momentum,
    weighted,
    weighted_pair,
)
from tests.support.small import check_usable
from tests.support.stage_models import (
    ALL,
    HALVED,
    SCHEDULES,
    Adapted,
    Around,
    Blocks,
    Queries,
    SecondFirst,
    Tied,
    check_equals_one_process,
    loss,
    make_model,
    make_rows,
    train,
    train_alone,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("cluster", [2], indirect=True)]


class Masked(Blocks):
    """Model with a mask of the input, which has no gradient, and a slice of a buffer in each block."""

    def forward(self, x: torch.Tensor) -> Any:
        mask, waves = x.sum(1, keepdim=True) > 0, self.waves[:WIDTH]
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x * waves)).masked_fill(mask, 0.5) + x
        return self.head(x)


class Returning(Blocks):
    """Model that uses its first layer's output again in its head."""

    def forward(self, x: torch.Tensor) -> Any:
        x = first = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x + first)


class Named(Blocks):
    """Model that returns a dict, with one entry from the first stage."""

    def forward(self, x: torch.Tensor) -> Any:
        first = self.embed(x)
        x = first
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"first": first, "scores": self.head(x)}


class Strided(Blocks):
    """Model that sends transposed tensors, like those of pictures cut into patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(1, WIDTH, 1)
        self.place = nn.Parameter(torch.randn(FEATURES, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x[:, None]).transpose(1, 2) + self.place
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x.mean(1))


class Expanded(Blocks):
    """Model whose blocks return expanded views, and whose gradients are expanded views, too."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x)).mean(1, keepdim=True).expand(-1, WIDTH)
        return self.head(x)


def flattened() -> nn.Module:
    """Return a Sequential that is split right after layers that return views."""
    net = [nn.Unflatten(1, (2, FEATURES // 2)), nn.Flatten(), nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Identity()]
    return nn.Sequential(
        *net, nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, -1)), nn.Flatten(), nn.Linear(WIDTH, CLASSES)
    )


def make_frozen(num_frozen: int) -> Callable[[], nn.Module]:
    """Return a function that makes a model with that many frozen first layers."""

    def make() -> nn.Module:
        sizes = [FEATURES, *[WIDTH] * 7, CLASSES]
        net = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)])
        for layer in net[:num_frozen]:
            layer.requires_grad_(requires_grad=False)
        return net

    return make


class Conditioned(Blocks):
    """Model with frozen first layers, except for one whose output the head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.cond = nn.Linear(FEATURES, WIDTH)
        for layer in (self.embed, self.blocks[0]):
            layer.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        c, x = self.cond(x), self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x + c)


def make_three(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that makes a sequence of three such layers."""
    return lambda: nn.Sequential(nn.Linear(FEATURES, WIDTH), make(), make(), make(), nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize("make", [Masked, *map(slow, (SecondFirst, Returning, Named, Strided, Expanded))])
def test_models_of_blocks_train_as_one_process(cluster: dtkit.Cluster, make: Callable[[], nn.Module]):
    """Values skip whole stages, and the V schedule passes them on without sending."""
    check_equals_one_process(cluster, make, ALL)


@pytest.mark.parametrize(
    "make",
    [flattened, *(slow(make_frozen(layer)) for layer in (3, 1, 5))],
    ids=["views", "3 frozen", "1 frozen", "5 frozen"],
)
def test_sequences_of_layers_train_as_one_process(cluster: dtkit.Cluster, make: Callable[[], nn.Module]):
    """torch's split backward pass finds weights by the gradients of inputs, which frozen stages don't have."""
    check_equals_one_process(cluster, make, ALL)


@pytest.mark.parametrize(
    "make",
    [slow(Conditioned), make_three(Tied), *(slow(make_three(layer)) for layer in (Queries, Around, Adapted))],
    ids=["frozen", "tied", "queries", "around", "lora"],
)
def test_weights_that_need_a_whole_backward_pass_train_as_one_process(
    cluster: dtkit.Cluster, make: Callable[[], nn.Module]
):
    """torch's second half would skip some weights, or use a graph that another one has freed."""
    check_equals_one_process(cluster, make, HALVED)


@pytest.mark.slow
def test_loss_pair_trains_as_one_process(cluster: dtkit.Cluster):
    expected = train_alone(Blocks, weighted)
    for strategy in ALL:
        run = train(cluster, Blocks, strategy, weighted_pair)
        assert max_difference(run.model.state_dict(), expected.state_dict()) <= BOUND


class TrainingDependent(Blocks):
    """Model that reads `self.training` itself."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = F.dropout(torch.tanh(block(x)), 0.5, self.training)
        return self.head(x * 3 if self.training else x)


def test_evaluation_uses_the_model_in_eval_mode(cluster: dtkit.Cluster):
    run = train(cluster, TrainingDependent, SCHEDULES[0])
    inputs, targets = data()
    with torch.no_grad():
        expected = loss(run.model.eval()(inputs), targets).item()
    assert run.evaluate(make_rows(TrainingDependent)).values["loss"] == pytest.approx(expected, abs=BOUND)


def test_values_that_skip_stages_can_be_explained(cluster: dtkit.Cluster):
    strategy = SCHEDULES[1]
    options: dict[str, Any] = {"optimizer": momentum, "batch_size": BATCH, "steps": 2, "loss": loss}
    run = cluster.train(make_model(Returning), data(), strategy=strategy, start=False, **options)
    assert run.explain_step().is_intact
    run.stop()


class ReturnsInt(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        return {"scores": super().forward(x), "rows": len(x)}


def scores_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["scores"], target)


def test_stage_output_that_is_not_a_tensor_is_refused(cluster: dtkit.Cluster):
    with pytest.raises(dtkit.errors.EngineError, match=r"returns int besides tensors.*dtkit\.Sharded"):
        train(cluster, ReturnsInt, SCHEDULES[0], loss_fn=scores_loss)
    check_usable(cluster)

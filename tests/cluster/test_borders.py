"""What crosses the borders between a pipeline's stages, for models as people write them; each against one process."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.support.nets import WIDTH
from tests.support.oracle import (
    BATCH,
    BOUND,
    CLASSES,
    FEATURES,
    data,
    difference,
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
    alone,
    check,
    loss,
    made,
    rows,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("cluster", [2], indirect=True)]


class Masked(Blocks):
    """A mask of the input, which has no gradient, and a slice of a buffer in every block."""

    def forward(self, x: torch.Tensor) -> Any:
        mask, waves = x.sum(1, keepdim=True) > 0, self.waves[:WIDTH]
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x * waves)).masked_fill(mask, 0.5) + x
        return self.head(x)


class Returning(Blocks):
    """Uses its first layer's output again in its head, over all stages."""

    def forward(self, x: torch.Tensor) -> Any:
        x = first = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x + first)


class Named(Blocks):
    """Returns a dict, one entry of it made in the first stage."""

    def forward(self, x: torch.Tensor) -> Any:
        first = self.embed(x)
        x = first
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"first": first, "scores": self.head(x)}


class Strided(Blocks):
    """Hands on what lies in memory the other way round, as pictures cut into patches do."""

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
    """Its blocks return a view that is an expansion, and the gradients that come back are one."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x)).mean(1, keepdim=True).expand(-1, WIDTH)
        return self.head(x)


def flattened() -> nn.Module:
    """A Sequential with layers that return views, cut right behind them."""
    net = [nn.Unflatten(1, (2, FEATURES // 2)), nn.Flatten(), nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Identity()]
    return nn.Sequential(
        *net, nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, -1)), nn.Flatten(), nn.Linear(WIDTH, CLASSES)
    )


def frozen(first: int) -> Callable[[], nn.Module]:
    """So many first layers are not trained."""

    def make() -> nn.Module:
        sizes = [FEATURES, *[WIDTH] * 7, CLASSES]
        net = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)])
        for layer in net[:first]:
            layer.requires_grad_(requires_grad=False)
        return net

    return make


class Conditioned(Blocks):
    """Its first layers are frozen, but for one whose output is used in the head."""

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


def layers_of(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Three of a kind in a sequence."""
    return lambda: nn.Sequential(nn.Linear(FEATURES, WIDTH), make(), make(), make(), nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize("make", [SecondFirst, Masked, Returning, Named, Strided, Expanded])
def test_a_model_of_blocks(cluster: dtkit.Cluster, make: Callable[[], nn.Module]):
    """Four engines' worth of stages on two: values pass whole stages by, and a V hands them on without sending."""
    check(cluster, make, ALL)


@pytest.mark.parametrize("make", [flattened, frozen(1), frozen(3), frozen(5)], ids=["views", "1", "3", "5"])
def test_a_sequence_of_layers(cluster: dtkit.Cluster, make: Callable[[], nn.Module]):
    """Torch's halved backward passes find weights by way of the inputs' gradients, which frozen stages have none of."""
    check(cluster, make, ALL)


@pytest.mark.parametrize(
    "make",
    [Conditioned, *map(layers_of, (Queries, Tied, Around, Adapted))],
    ids=["frozen", "queries", "tied", "around", "lora"],
)
def test_weights_that_can_t_wait_for_the_second_half(cluster: dtkit.Cluster, make: Callable[[], nn.Module]):
    """Torch's second half would leave some of them out, or come through what another one's has freed."""
    check(cluster, make, HALVED)


def test_a_loss_that_is_a_pair_and_a_view(cluster: dtkit.Cluster):
    expected = alone(Blocks, weighted)
    for strategy in ALL:
        run = train(cluster, Blocks, strategy, weighted_pair)
        assert difference(run.model.state_dict(), expected.state_dict()) <= BOUND


class Asking(Blocks):
    """Asks itself whether it is training, in place of a module that does."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = F.dropout(torch.tanh(block(x)), 0.5, self.training)
        return self.head(x * 3 if self.training else x)


def test_evaluation_is_of_the_model_that_evaluates(cluster: dtkit.Cluster):
    run = train(cluster, Asking, SCHEDULES[0])
    inputs, targets = data()
    with torch.no_grad():
        expected = loss(run.model.eval()(inputs), targets).item()
    assert run.evaluate(rows(Asking)).values["loss"] == pytest.approx(expected, abs=BOUND)


def test_an_explained_step_of_values_that_pass_by(cluster: dtkit.Cluster):
    strategy = SCHEDULES[1]
    how: dict[str, Any] = {"optimizer": momentum, "batch_size": BATCH, "steps": 2, "loss": loss}
    run = cluster.train(made(Returning), data(), strategy=strategy, start=False, **how)
    assert run.explain_step().is_intact
    run.stop()


class Counting(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        return {"scores": super().forward(x), "rows": len(x)}


def test_what_is_no_tensor_can_t_be_handed_on(cluster: dtkit.Cluster):
    with pytest.raises(dtkit.errors.EngineError, match=r"returns int besides tensors.*dtkit\.Sharded"):
        train(cluster, Counting, SCHEDULES[0])
    check_usable(cluster)

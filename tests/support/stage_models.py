"""Models whose stages send more than one tensor, and the check that pipelines train them exactly."""

from __future__ import annotations

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
    SEED,
    data,
    get_global_rows,
    max_difference,
    momentum,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


STEPS = 6


SCHEDULES = [
    dtkit.Pipeline(2, 3, balance_by="parameters"),
    dtkit.Pipeline(2, 4, "Interleaved1F1B", balance_by="parameters"),
]


HALVED = [
    dtkit.Pipeline(2, 4, "ZBVZeroBubble", balance_by="parameters"),
    dtkit.Pipeline(2, 4, "InterleavedZeroBubble", balance_by="parameters"),
    dtkit.Pipeline(2, schedule=["F0 F1 B0 B1", "F0 I0 F1 I1 W0 W1"], balance_by="parameters"),
]


ALL = [*SCHEDULES, *HALVED]


class Blocks(nn.Module):
    """Model of four blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("waves", torch.linspace(0.5, 1.5, 2 * WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class SecondFirst(Blocks):
    """Model of two inputs that uses the second one first, and both in each block."""

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        z, x = self.embed(z), self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x) + z)
        return self.head(x)


class Queries(nn.Module):
    """Layer whose learned queries attend to each other, and then to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.first, self.second = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, z = self.q.expand(len(x), -1, -1), torch.stack([x, x.tanh()], 1)
        q = q + self.first(q, q, q)[0]
        return x + self.second(q, z, z)[0].sum(1)


class Tied(nn.Module):
    """Layer that uses one matrix twice, each time with another bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first_bias, self.second_bias = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(torch.tanh(F.linear(x, self.w, self.first_bias)), self.w, self.second_bias))


class Around(nn.Module):
    """Layer that uses one matrix twice, with another one between."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.between = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in (self.w, self.between, self.w):
            x = torch.tanh(x @ w)
        return x


class Adapted(nn.Module):
    """Layer of two matrices, to both of which a function of a third one is added."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.lora = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = self.lora.weight.tanh()
        return torch.tanh(F.linear(x, self.q.weight + change)) * F.linear(x, self.k.weight + change)


def scores(output: Any) -> torch.Tensor:
    return output["scores"] + output["first"].sum(1, keepdim=True).tanh() if isinstance(output, dict) else output


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores(output), target)


def make_model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return make().double()


def make_rows(make: Callable[[], nn.Module]) -> tuple[torch.Tensor, ...]:
    inputs, targets = data()
    return (inputs, inputs * 2, targets) if make is SecondFirst else (inputs, targets)


def train_alone(make: Callable[[], nn.Module], loss_fn: Callable[..., torch.Tensor], steps: int = STEPS) -> nn.Module:
    """Train the model in one process."""
    model, (*inputs, targets) = make_model(make), make_rows(make)
    update = momentum([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        batch = torch.from_numpy(get_global_rows(step))
        update.zero_grad()
        loss_fn(model(*(x[batch] for x in inputs)), targets[batch]).backward()
        update.step()
    return model


def train(
    cluster: dtkit.Cluster, make: Callable[[], nn.Module], strategy: Any, loss_fn: Any = loss, steps: int = STEPS
) -> dtkit.Run:
    options: dict[str, Any] = {
        "optimizer": momentum,
        "batch_size": BATCH,
        "steps": steps,
        "seed": SEED,
        "shuffle": "global",
    }
    run = cluster.train(make_model(make), make_rows(make), loss=loss_fn, strategy=strategy, **options)
    run.wait(60)
    return run


def check_equals_one_process(cluster: dtkit.Cluster, make: Callable[[], nn.Module], strategies: Sequence[Any]) -> None:
    expected = train_alone(make, loss)
    *inputs, targets = make_rows(make)
    with torch.no_grad():
        expected_loss = loss(expected.eval()(*inputs), targets).item()
    for strategy in strategies:
        run = train(cluster, make, strategy)
        assert max_difference(run.model.state_dict(), expected.state_dict()) <= BOUND, strategy
        assert run.evaluate(make_rows(make)).values["loss"] == pytest.approx(expected_loss, abs=BOUND), strategy

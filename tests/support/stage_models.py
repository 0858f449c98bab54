"""Models whose stages pass on more than one tensor, and the check that a pipeline trains them exactly."""

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
    difference,
    global_rows,
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
    """Four blocks between an embedding and a head."""

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
    """Takes two inputs and uses the second one first; both in every block."""

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        z, x = self.embed(z), self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x) + z)
        return self.head(x)


class Queries(nn.Module):
    """Learned queries attend to each other, and then to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.first, self.second = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, z = self.q.expand(len(x), -1, -1), torch.stack([x, x.tanh()], 1)
        q = q + self.first(q, q, q)[0]
        return x + self.second(q, z, z)[0].sum(1)


class Tied(nn.Module):
    """One matrix twice, each time with another bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(torch.tanh(F.linear(x, self.w, self.one)), self.w, self.other))


class Around(nn.Module):
    """One matrix twice, and another one between."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.between = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in (self.w, self.between, self.w):
            x = torch.tanh(x @ w)
        return x


class Adapted(nn.Module):
    """Two matrices that a third one is added to, or what is made of it."""

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


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return make().double()


def rows(make: Callable[[], nn.Module]) -> tuple[torch.Tensor, ...]:
    inputs, targets = data()
    return (inputs, inputs * 2, targets) if make is SecondFirst else (inputs, targets)


def alone(make: Callable[[], nn.Module], judge: Callable[..., torch.Tensor], steps: int = STEPS) -> nn.Module:
    """One process."""
    model, (*inputs, targets) = made(make), rows(make)
    update = momentum([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        chosen = torch.from_numpy(global_rows(step))
        update.zero_grad()
        judge(model(*(x[chosen] for x in inputs)), targets[chosen]).backward()
        update.step()
    return model


def train(
    cluster: dtkit.Cluster, make: Callable[[], nn.Module], strategy: Any, judge: Any = loss, steps: int = STEPS
) -> dtkit.Run:
    how: dict[str, Any] = {
        "optimizer": momentum,
        "batch_size": BATCH,
        "steps": steps,
        "seed": SEED,
        "shuffle": "global",
    }
    run = cluster.train(made(make), rows(make), loss=judge, strategy=strategy, **how)
    run.wait(60)
    return run


def check(cluster: dtkit.Cluster, make: Callable[[], nn.Module], strategies: Sequence[Any]) -> None:
    expected = alone(make, loss)
    *inputs, targets = rows(make)
    with torch.no_grad():
        expected_loss = loss(expected.eval()(*inputs), targets).item()
    for strategy in strategies:
        run = train(cluster, make, strategy)
        assert difference(run.model.state_dict(), expected.state_dict()) <= BOUND, strategy
        assert run.evaluate(rows(make)).values["loss"] == pytest.approx(expected_loss, abs=BOUND), strategy

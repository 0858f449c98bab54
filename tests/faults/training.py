"""The training for faults: tiny, in float64, and the same each time, for every strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from dtkit import DataParallel, ParameterAveraging, Pipeline, Sharded, TensorParallel

if TYPE_CHECKING:
    from collections.abc import Iterable

    import dtkit
    from dtkit.strategies.base import Strategy
    from tests.faults.trap import Slowness, Trap

ROWS, FEATURES, WIDTH, CLASSES, BATCH = 96, 6, 8, 3, 16
SNAPSHOT = 4
"""Steps between snapshots for strategies in which a rank holds the only copy of a part."""

STRATEGIES: dict[str, Strategy] = {
    "DataParallel": DataParallel(),
    "ParameterAveraging": ParameterAveraging(every=4),
    "Pipeline": Pipeline(2, 4, split=["2"]),
    "TensorParallel": TensorParallel(2),
    "Sharded": Sharded(),
}
REPLICATED = ("DataParallel", "ParameterAveraging")
"""Strategies in which each rank holds a whole copy."""


class Trapped(nn.Tanh):
    """Activation with a trap in its forward and backward pass."""

    def __init__(self, trap: Trap | Slowness | None) -> None:
        super().__init__()
        self.trap = trap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        trap = self.trap
        if trap is None or not self.training:
            return output
        if output.requires_grad:
            output.register_hook(lambda gradient: trap.trigger("backward", gradient))
        result: torch.Tensor = trap.trigger("forward", output)
        return result


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with a trap in their loading."""

    def __init__(self, trap: Trap | Slowness | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
        self._y = torch.randint(CLASSES, (ROWS,), generator=generator)
        self._trap = trap

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._x[index]
        return (row if self._trap is None else self._trap.trigger("data", row)), self._y[index]


class Optimizer(torch.optim.SGD):
    """SGD with a trap before the update."""

    def __init__(self, parameters: Iterable[Any], trap: Trap | Slowness | None) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self._trap = trap

    def step(self, closure: Any = None) -> Any:
        if self._trap is not None:
            self._trap.trigger("optimizer")
        return super().step(closure)


class Scheduler(torch.optim.lr_scheduler.StepLR):
    """Scheduler with a trap in `state_dict`, which checkpoints call."""

    def __init__(self, optimizer: torch.optim.Optimizer, trap: Trap | Slowness | None) -> None:
        self._trap = trap
        super().__init__(optimizer, step_size=10)

    def state_dict(self) -> dict[str, Any]:
        if self._trap is not None:
            self._trap.trigger("checkpoint")
        return {name: value for name, value in super().state_dict().items() if name != "_trap"}


def net(trap: Trap | Slowness | None = None) -> nn.Module:
    """Return a chain that every strategy can split in two."""
    torch.manual_seed(3)
    first, second, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(first, Trapped(trap), second, Trapped(trap), last).double()


def start(cluster: dtkit.Cluster, strategy: str, trap: Trap | Slowness | None = None, **options: Any) -> dtkit.Run:
    """Create a run that has not begun."""
    arguments: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": lambda parameters: Optimizer(parameters, trap),
        "lr_scheduler": lambda optimizer: Scheduler(optimizer, trap),
        "strategy": STRATEGIES[strategy],
        "batch_size": BATCH,
        "shuffle": "global",
        "snapshot_every": None if strategy in REPLICATED else SNAPSHOT,
        "start": False,
    }
    return cluster.train(net(trap), Rows(trap), **(arguments | options))


def max_difference(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any parameter."""
    assert state.keys() == other.keys()
    return max(float((state[name] - other[name]).abs().max()) for name in state)

"""A small training, which most tests use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dtkit

ROWS = 64
LONG = 100_000
"""Number of steps that no test waits for."""


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 4, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def train(cluster: dtkit.Cluster, model: Any = None, rows: Any = None, **options: Any) -> dtkit.Run:
    """Start a run of 20 steps with 16 samples each, changed by `options`."""
    defaults: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": sgd, "batch_size": 16}
    if "epochs" not in options:
        defaults["steps"] = 20
    return cluster.train(net() if model is None else model, data() if rows is None else rows, **(defaults | options))


def check_usable(cluster: dtkit.Cluster) -> None:
    """Check that the cluster can train."""
    run = train(cluster, steps=2)
    run.wait(60)
    assert len(run.history) == 2 * cluster.world_size
    assert run.status.state is dtkit.types.State.COMPLETED

"""Optimizers that look at the model: groups by name and shape train as in one process, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support import small

pytestmark = pytest.mark.cluster

STRATEGIES = [
    dtkit.DataParallel(),
    dtkit.Sharded(),
    dtkit.Pipeline(2, 2),
    dtkit.TensorParallel(2, plan={"layers.0": "colwise", "layers.2": "rowwise"}),
]


class Configured(nn.Module):
    """Model that makes its own optimizer, in the manner of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result

    def configure_optimizers(self, weight_decay: float) -> torch.optim.Optimizer:
        decayed = [p for _, p in self.named_parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def configure(model: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = model.configure_optimizers(weight_decay=0.5)
    return optimizer


def group_by_name(named_parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with another rate for the last layer."""
    groups = [{"params": [p], "lr": 0.05 if name.startswith("layers.4") else 0.01} for name, p in named_parameters]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("optimizer", [configure, group_by_name])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
def test_groups_of_an_optimizer_train_as_in_one_process(cluster2: dtkit.Cluster, strategy: Any, optimizer: Any):
    run = small.train(cluster2, Configured(), optimizer=optimizer, strategy=strategy, steps=4)
    run.wait(60)
    verification = run.verify(4)
    assert verification.verdict == "PASS", verification.text()

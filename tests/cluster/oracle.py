"""The reference that distributed training is held to: one process, a plain loop, float64.

Fifty steps; the bound is 1e-12, and what is seen is about 1e-16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    import dtkit

SAMPLES, FEATURES, CLASSES = 121, 6, 3  # 121 divides by none of 2, 3, 4; batches of 24 leave a last one of 1
BATCH, STEPS, SEED = 24, 50, 5
BOUND = 1e-12


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def mlp() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def one_process(
    model: nn.Module,
    rows: Callable[[int], np.ndarray],
    loss: Callable[..., torch.Tensor] = mean_loss,
    optimizer: Callable[..., torch.optim.Optimizer] = momentum,
    steps: int = STEPS,
) -> dict[str, torch.Tensor]:
    """The reference: one process, one batch a step, made of `rows(step)`."""
    inputs, targets = data()
    update = optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        chosen = torch.from_numpy(rows(step))
        update.zero_grad()
        loss(model(inputs[chosen]), targets[chosen]).backward()
        update.step()
    return model.state_dict()


def global_rows(step: int) -> np.ndarray:
    """What shuffle="global" promises: the epoch's permutation of all rows, a slice a step."""
    per_epoch = -(-SAMPLES // BATCH)
    order = np.random.default_rng([SEED, step // per_epoch]).permutation(np.arange(SAMPLES))
    start = step % per_epoch * BATCH
    return order[start : start + BATCH]


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def train(cluster: dtkit.Cluster, model: nn.Module, part: Any = None, **options: Any) -> dtkit.Run:
    how = {"loss": mean_loss, "optimizer": momentum, "batch_size": BATCH, "steps": STEPS, "seed": SEED} | options
    run = cluster.train(model, cluster.partition(data()) if part is None else part, **how)
    run.wait(120)
    return run

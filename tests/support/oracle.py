"""Reference for distributed training: a plain loop in one process, in float64, met to BOUND."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    import dtkit

SAMPLES, FEATURES, CLASSES = 121, 6, 3  # neither 2, 3 nor 4 divides 121; batches of 24 leave a last batch of 1
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


Loss = Callable[[torch.Tensor, torch.Tensor], Any]
CLASS_WEIGHTS = (1.0, 5.0, 0.2)


def weighted_pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = output.new_tensor(CLASS_WEIGHTS)
    return F.cross_entropy(output, target, weight=weights, reduction="sum"), weights[target].sum()


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, weight=output.new_tensor(CLASS_WEIGHTS))


def make_weighted_module() -> nn.Module:
    """Return torch's own loss with class weights, which also ignores a class and smooths the labels."""
    weight = torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)
    return nn.CrossEntropyLoss(weight, ignore_index=2, label_smoothing=0.1)


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "mean": (mean_loss, mean_loss),
    "pair": (weighted_pair, weighted),
    "weighted module": (make_weighted_module(), make_weighted_module()),
}
"""Loss for a cluster, and the equivalent for the plain loop over whole batches."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """Final state of a model, and the loss of each step."""

    state: dict[str, torch.Tensor]
    losses: np.ndarray


def train_reference(
    model: nn.Module,
    rows: Callable[[int], np.ndarray],
    loss: Loss = mean_loss,
    optimizer: Callable[..., torch.optim.Optimizer] = momentum,
    steps: int = STEPS,
) -> Trained:
    """Train `model` in place, with one batch of `rows(step)` per step."""
    inputs, targets = data()
    update = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        batch = torch.from_numpy(rows(step))
        update.zero_grad()
        value = loss(model(inputs[batch]), targets[batch])
        value.backward()
        update.step()
        losses.append(value.item())
    return Trained(model.state_dict(), np.array(losses))


def train_in_one_process(
    model: nn.Module, rows: Callable[[int], np.ndarray], *args: Any, **options: Any
) -> dict[str, Any]:
    """Return the state dict that `train_reference` ends with."""
    return train_reference(model, rows, *args, **options).state


def get_global_rows(step: int, batch: int = BATCH) -> np.ndarray:
    """Return the rows that shuffle="global" promises: a slice of the epoch's permutation of all rows."""
    per_epoch = -(-SAMPLES // batch)
    order = np.random.default_rng([SEED, step // per_epoch]).permutation(np.arange(SAMPLES))
    start = step % per_epoch * batch
    return order[start : start + batch]


def max_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def train(cluster: dtkit.Cluster, model: nn.Module, part: Any = None, **options: Any) -> dtkit.Run:
    """Return a completed run, or with `start=False` one that hasn't begun."""
    arguments = {"loss": mean_loss, "optimizer": momentum, "batch_size": BATCH, "steps": STEPS, "seed": SEED} | options
    run = cluster.train(model, cluster.partition(data()) if part is None else part, **arguments)
    if arguments.get("start", True):
        run.wait(120)
    return run

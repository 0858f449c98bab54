"""The measured trainings, the same under dtkit and under bare torchrun."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Work:
    """Multilayer perceptron on random numbers; `width` and `batch` set the length of a step."""

    width: int
    depth: int
    batch: int
    """Samples per update over all ranks."""
    steps: int
    warm: int = 30

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(64, self.width), nn.ReLU()]
        for _ in range(self.depth):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        rows = 8192
        return torch.randn(rows, 64, generator=generator), torch.randint(10, (rows,), generator=generator)


SHORT, LONG, WIDE = "short steps (1 to 2 ms)", "steps of 20 ms and more", "100 MB of gradients"
LINK, COMPUTING = "10 MB of gradients", "mostly computing"
HEAVY, MEDIUM = "a split model, steps of 200 ms and more", "a split model, steps of 20 to 50 ms"
QUICK = "a split model, short steps"
FIRST = "the first step"
SAVED_50, SAVED_200 = "50 MB of parameters and momentum", "200 MB of parameters and momentum"
PIPELINE, TENSOR, SHARDED = "pipeline", "tensor", "sharded"
MICRO_BATCHES = 4
WORKS = {
    SHORT: Work(width=64, depth=1, batch=64, steps=4000, warm=200),
    LONG: Work(width=512, depth=3, batch=1024, steps=300),
    WIDE: Work(width=3510, depth=2, batch=2, steps=20, warm=4),
    LINK: Work(width=1120, depth=2, batch=32, steps=8, warm=8),
    COMPUTING: Work(width=256, depth=3, batch=4096, steps=60, warm=60),
    HEAVY: Work(width=1024, depth=4, batch=1024, steps=24, warm=6),
    MEDIUM: Work(width=512, depth=4, batch=512, steps=120, warm=40),
    FIRST: Work(width=64, depth=1, batch=64, steps=1, warm=0),
    QUICK: Work(width=64, depth=4, batch=64, steps=200, warm=30),
    SAVED_50: Work(width=1750, depth=2, batch=16, steps=60, warm=20),
    SAVED_200: Work(width=3510, depth=2, batch=16, steps=40, warm=20),
}


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def colwise_rowwise(work: Work) -> dict[str, str]:
    """Return a tensor-parallel plan with the linear layers in pairs."""
    linear = [name for name, layer in work.model().named_children() if isinstance(layer, nn.Linear)]
    return {name: ("colwise", "rowwise")[k % 2] for k, name in enumerate(linear)}


def middle(work: Work) -> int:
    """Return the index at which a model's second half begins."""
    return work.depth // 2 * 2 + 2


def halves(work: Work) -> tuple[nn.Module, nn.Module]:
    """Return a model in two stages."""
    model = work.model()
    assert isinstance(model, nn.Sequential)
    return model[: middle(work)], model[middle(work) :]

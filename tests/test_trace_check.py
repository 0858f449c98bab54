"""Models whose trace would train differently: a pipeline refuses them."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing import reductions
from torch.utils import checkpoint

from dtkit.planning.layer_chain import LayerCosts
from dtkit.strategies.loss import ModelInputs
from dtkit.strategies.pipeline.cut import StageCut
from dtkit.strategies.pipeline.trace import split_model

CPU = torch.device("cpu")


class Blocks(nn.Module):
    """A model that can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.count = 0

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.change(self.blocks[0](x)))


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -gradient


class Reversed(Blocks):
    """Adversarial model, whose first block gets the negative gradient."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return Reversal.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Damped(Blocks):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.1)
        return x


class Hooked(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.1,))


class Skipping(Blocks):
    """Model with stochastic depth, in numbers of Python's."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if random.random() < 0.5 else x


class Noisy(Blocks):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(np.random.rand())  # noqa: NPY002 - as users do


class Annealed(Blocks):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


class Cached(Blocks):
    """Model that keeps a number from its first forward pass."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.count = max(self.count, len(x))
        return x


class Decorated(Blocks):
    """Model with checkpoints of activations, whose gradients are those without."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint.checkpoint(torch.tanh, x.detach() + x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")  # of torch's exporter
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Reversed, "its backward pass has ReversalBackward, and a trace would lose it"),
        (Damped, r"its backward pass has hooks on gradients \(register_hook\)"),
        (Hooked, "its backward pass has BackwardHookFunctionBackward"),
        (Skipping, "its forward draws numbers from random, and a trace would repeat the first draw"),
        (Noisy, r"its forward draws numbers from numpy\.random"),
        (Annealed, "its forward changes count, a number that a trace would not change"),
        (Cached, ""),
        (Decorated, ""),
    ],
)
def test_model_whose_trace_would_train_differently_is_refused(model: Any, reason: str):
    cut = StageCut(("blocks.0", "blocks.1"), LayerCosts((1.0, 1.0)), (0, 1))
    with pytest.raises(ValueError, match=reason) if reason else contextlib.nullcontext():
        split_model(model(), cut, ModelInputs((torch.ones(4, 2),)), CPU)


class SharedScale(Blocks):
    """Both stages use one parameter. torch's fake tensors keep a weak reference to the constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x) * self.scale * torch.tensor(2.0)) * self.scale


@pytest.mark.filterwarnings("ignore")  # of torch: its exporter warns of its own code
def test_a_trace_copies_no_weak_reference_to_a_storage(monkeypatch):
    """A copy would be given back twice, which writes into freed memory and crashes engines later."""
    copies: list[int] = []

    def reduce(reference: reductions.StorageWeakRef, protocol: int) -> Any:
        copies.append(reference.cdata)
        return object.__reduce_ex__(reference, protocol)

    monkeypatch.setattr(reductions.StorageWeakRef, "__reduce_ex__", reduce)
    cut = StageCut(("blocks.0", "blocks.1"), LayerCosts((1.0, 1.0)), (0, 1))
    split_model(SharedScale(), cut, ModelInputs((torch.zeros(2, 2),)), CPU)
    assert not copies

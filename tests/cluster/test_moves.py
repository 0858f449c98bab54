"""A rank moves its own part of a model to its device, and nothing else of it: counted in real trainings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import dtkit
from tests.support.nets import Decoder, worker
from tests.support.oracle import CLASSES, FEATURES, train

if TYPE_CHECKING:
    from dtkit.strategies.base import Strategy, Worker

pytestmark = pytest.mark.cluster

WIDTH = 128


class Moves(TorchFunctionMode):
    """The most numbers that were in one tensor, and those in all tensors, that were asked to be on a device.

    On a CPU that asks for nothing, where the tensor is there already; on a GPU the same call would move it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and made.is_floating_point() and not made.is_meta:
            self.numbers += made.numel()
        return made


def watching(kind: type[Strategy]) -> type[Strategy]:
    """A strategy that counts what its setting up moves."""

    @dataclasses.dataclass(frozen=True, repr=False)
    class Watched(kind):  # type: ignore[misc, valid-type]
        def setup(self, *args: Any) -> Worker:
            with Moves() as moves:
                made: Worker = super().setup(*args)
            made.moves = moves  # type: ignore[attr-defined]
            return made

    return Watched


def chain() -> nn.Module:
    """Eight equal layers, next to which first and last are small."""
    middle = [part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *middle, nn.Linear(WIDTH, CLASSES))


def blocks() -> nn.Module:
    """Traced, where it is cut into stages."""
    return Decoder(blocks=8)


@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [
        (chain, dtkit.Pipeline, {"stages": 2, "micro_batches": 4, "balance_by": "parameters"}),
        (
            blocks,
            dtkit.Pipeline,
            {"stages": 2, "micro_batches": 4, "balance_by": "parameters", "schedule": "ZBVZeroBubble"},
        ),
        (chain, dtkit.Sharded, {}),
        (chain, dtkit.TensorParallel, {"tp_size": 2}),
    ],
    ids=["pipeline", "traced pipeline", "sharded", "tensor parallel"],
)
def test_a_rank_moves_its_own_part_only(
    cluster2: dtkit.Cluster, make: Any, kind: type[Strategy], options: dict[str, Any]
):
    def numbers() -> tuple[int, int]:
        found = worker()
        held = [*found.model.parameters(), *found.model.buffers()]
        own = [t.to_local() if hasattr(t, "to_local") else t for t in held]
        return found.moves.numbers, sum(t.numel() for t in own if t.is_floating_point())

    torch.manual_seed(0)
    model = make().double()
    train(cluster2, model, strategy=watching(kind)(**options), steps=2)
    whole = sum(p.numel() for p in model.parameters())
    for moved, own in cluster2.run(numbers):
        print(f"{moved:,} moved, {own:,} held, of {whole:,}")
        assert own <= moved <= 1.05 * own  # the samples that a model is tried on besides
        assert own < 0.6 * whole

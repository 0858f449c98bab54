"""Ranks move only their own part of a model to their device, counted in real trainings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import dtkit
from tests.support.nets import Decoder, get_worker
from tests.support.oracle import CLASSES, FEATURES, train

if TYPE_CHECKING:
    from dtkit.strategies.base import Strategy, Worker

pytestmark = pytest.mark.cluster

WIDTH = 128


class MoveCounter(TorchFunctionMode):
    """Count of the floating-point numbers in all calls of `Tensor.to`.

    On a CPU such a call moves nothing; on a GPU the same call would.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and result.is_floating_point() and not result.is_meta:
            self.numbers += result.numel()
        return result


def count_moves(kind: type[Strategy]) -> type[Strategy]:
    """Return a strategy that counts the moves of its setup."""

    @dataclasses.dataclass(frozen=True, repr=False)
    class Counted(kind):  # type: ignore[misc, valid-type]
        def setup(self, *args: Any) -> Worker:
            with MoveCounter() as moves:
                worker: Worker = super().setup(*args)
            worker.moves = moves  # type: ignore[attr-defined]
            return worker

    return Counted


def chain() -> nn.Module:
    """Return eight equal layers between a small first and last one."""
    middle = [part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *middle, nn.Linear(WIDTH, CLASSES))


def blocks() -> nn.Module:
    """Return a model that is traced to be split into stages."""
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
def test_rank_moves_only_its_own_part_to_the_device(
    cluster2: dtkit.Cluster, make: Any, kind: type[Strategy], options: dict[str, Any]
):
    def count_numbers() -> tuple[int, int]:
        worker = get_worker()
        tensors = [*worker.model.parameters(), *worker.model.buffers()]
        own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return worker.moves.numbers, sum(t.numel() for t in own if t.is_floating_point())

    torch.manual_seed(0)
    model = make().double()
    train(cluster2, model, strategy=count_moves(kind)(**options), steps=2)
    whole = sum(p.numel() for p in model.parameters())
    for moved, own in cluster2.run(count_numbers):
        print(f"{moved:,} moved, {own:,} held, of {whole:,}")
        assert own <= moved <= 1.05 * own  # plus the samples for the first trial
        assert own < 0.6 * whole

"""The idle share of pipelines whose stages have a declared cost, next to the formula.

Stages sleep, so that more ranks than cores can work at the same time, and all take equally long. What is measured above
the formula is a cost per action, whatever its length: sending, and waking up when a message has come (0.3 to 0.5 ms on
gloo), and in torch's looped runtime, which Interleaved1F1B runs on, posting sends and receives between two actions
(0.25 ms, against 0.02 ms with GPipe and 1F1B). Ranks also start a step some ms after each other. At 10 ms a piece that
is 0.03 to 0.05 of the time, as much as the whole bubble of an interleaved schedule, so pieces here are of 30 ms.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import dtkit
from tests.bench.pairs import Sample, report

PIECE_S = 0.03  # of a stage's forward pass, and of its backward pass
STEPS = 7
WARM = 1
TOLERANCE = 0.03
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")


class Slow(nn.Module):
    """A layer of declared cost: it sleeps, forward and backward."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # sleeps: a declared cost of a stage, large next to a busy machine's noise
        time.sleep(PIECE_S)
        return _SlowBackward.apply(self.layer(x))


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # sleeps: a declared cost, as in `forward`
        time.sleep(PIECE_S)
        return gradient


def bubble() -> bool:
    """Measured share against formula: 2 and 4 ranks, 4, 8 and 16 micro-batches, three schedules."""
    met = True
    for ranks in (2, 4):
        with dtkit.Cluster(ranks, threads=1) as cluster:
            for schedule in SCHEDULES:
                for micro_batches in (4, 8, 16):
                    met &= _report(
                        cluster, dtkit.Pipeline(ranks, micro_batches, schedule=schedule, balance_by="parameters")
                    )
    return met


def _report(cluster: dtkit.Cluster, strategy: dtkit.Pipeline) -> bool:
    timelines = _measure(cluster, strategy)
    measured = Sample([timeline.bubble() for timeline in timelines])
    planned = Sample([timeline.planned().bubble() for timeline in timelines])
    formula = timelines[0].get_ideal_bubble()
    print(
        f"  p={strategy.stages} m={strategy.micro_batches:2} {strategy.schedule:16} measured {measured.median:.3f}  "
        f"formula {formula:.3f}  difference {measured.median - formula:+.3f}  with these durations "
        f"{planned.median:.3f}",
        flush=True,
    )
    name = f"{strategy.schedule}, p={strategy.stages}, m={strategy.micro_batches}: bubble, off its formula by"
    return report(name, Sample([abs(value - formula) for value in measured.values]), most=TOLERANCE)


def _measure(cluster: dtkit.Cluster, strategy: dtkit.Pipeline) -> list[Any]:
    """The timelines of some steps, one by one."""
    model = nn.Sequential(*(Slow() for _ in range(strategy.pipeline_schedule.stages)))
    rows = torch.randn(256, 4), torch.randint(4, (256,))
    how: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": _sgd, "batch_size": 64, "steps": WARM + STEPS}
    run = cluster.train(model, rows, strategy=strategy, start=False, **how)
    run.step(WARM)
    found = []
    for _ in range(STEPS):
        run.step()
        found.append(run.timeline)
    return found


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)

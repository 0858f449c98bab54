"""The idle share of pipelines whose stages have a declared cost, next to the formula.

Stages sleep, so that more ranks than cores can work at the same time, all equally long. The excess over the formula is
a cost per action, whatever its length: sending, waking up for a message, and posting sends and receives. Actions take
30 ms here, which keeps that cost small next to the bubble.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import dtkit
from tests.bench.pairs import Sample, report

PASS_S = 0.03  # of a forward or backward pass of a stage
STEPS = 7
WARM = 1
TOLERANCE = 0.03
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")


class Slow(nn.Module):
    """Layer of a declared cost: it sleeps in its forward and backward pass."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # sleeps: a declared cost of a stage, large next to the noise of a busy machine
        time.sleep(PASS_S)
        return _SlowBackward.apply(self.layer(x))


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # sleeps: a declared cost, as in `forward`
        time.sleep(PASS_S)
        return gradient


def bubble() -> bool:
    """Compare measured shares with the formula: 2 and 4 ranks, 4, 8 and 16 micro-batches, three schedules."""
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
    measured = Sample([timeline.measure_bubble() for timeline in timelines])
    planned = Sample([timeline.simulate_schedule().measure_bubble() for timeline in timelines])
    formula = timelines[0].get_ideal_bubble()
    print(
        f"  p={strategy.stages} m={strategy.micro_batches:2} {strategy.schedule:16} measured {measured.median:.3f}  "
        f"formula {formula:.3f}  difference {measured.median - formula:+.3f}  simulated with these durations "
        f"{planned.median:.3f}",
        flush=True,
    )
    name = f"{strategy.schedule}, p={strategy.stages}, m={strategy.micro_batches}: bubble, off its formula by"
    return report(name, Sample([abs(value - formula) for value in measured.values]), most=TOLERANCE)


def _measure(cluster: dtkit.Cluster, strategy: dtkit.Pipeline) -> list[Any]:
    """Return the timelines of several single steps."""
    model = nn.Sequential(*(Slow() for _ in range(strategy.pipeline_schedule.stages)))
    rows = torch.randn(256, 4), torch.randint(4, (256,))
    options: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": _sgd,
        "batch_size": 64,
        "steps": WARM + STEPS,
    }
    run = cluster.train(model, rows, strategy=strategy, start=False, **options)
    run.step(WARM)
    timelines = []
    for _ in range(STEPS):
        run.step()
        timelines.append(run.timeline)
    return timelines


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)

"""Cost of `dtkit.log` in a training: two numbers of the user's own in each step, against none.

CPU time of the engines, since other programs disturb the time of a step by far more than 1 %.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch import nn

import dtkit
from tests.bench.pairs import alternate, ratios, report
from tests.bench.work import LONG, SHORT, WORKS, Work, optimizer

if TYPE_CHECKING:
    import torch

PAIRS = 15
SECONDS = 1.0
"""Of each measurement."""
MAX_COST = 0.01
_is_logging = [False]


def scalars() -> bool:
    """Compare steps that log two numbers with steps that log none, within one run."""
    met = True
    with dtkit.Cluster(2, threads=1) as cluster:
        for name in (LONG, SHORT):
            met &= _compare(cluster, name, WORKS[name])
    return met


def _compare(cluster: dtkit.Cluster, name: str, work: Work) -> bool:
    run = cluster.train(
        work.model(), work.data(), loss=compute_loss, optimizer=optimizer, batch_size=work.batch, steps=10**7,
        start=False,
    )  # fmt: skip
    start = time.perf_counter()
    run.step(work.warm)
    steps = max(10, round(SECONDS * work.warm / (time.perf_counter() - start)))

    def measure(is_logging: bool) -> float:  # noqa: FBT001 - the two sides of the pair
        cluster.run(set_logging, is_logging)
        run.step(steps // 10)
        start = sum(cluster.run(time.process_time))
        run.step(steps)
        return 1e6 * (sum(cluster.run(time.process_time)) - start) / steps / cluster.world_size

    logging, silent = alternate(lambda: measure(True), lambda: measure(False), PAIRS)
    run.stop()
    print(f"  microseconds of CPU a step and engine: {logging} with two numbers, {silent} without")
    return report(f"CPU of steps that log two numbers against none, {name}", ratios(logging, silent), most=1 + MAX_COST)


def set_logging(is_logging: bool) -> None:  # noqa: FBT001 - called on engines
    """Let the loss of this engine log, or not."""
    _is_logging[0] = is_logging


def compute_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, and log two numbers if told to."""
    loss: torch.Tensor = nn.functional.cross_entropy(output, target)
    if _is_logging[0]:
        dtkit.log(kl=loss.detach(), reward=0.5)
    return loss

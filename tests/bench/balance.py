"""Two engines, one of them slowed twofold: throughput of equal shares and of balance, against the ideal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

import dtkit
from tests.bench.pairs import Sample, report
from tests.bench.work import COMPUTING, WORKS, Work, optimizer

if TYPE_CHECKING:
    from dtkit.strategies.base import Strategy

ROUNDS = 3
SLOWED = 2.0


def balance() -> bool:
    """Measure the throughput as a share of the sum of what each rank computes by itself."""
    equal, balanced = [], []
    work = WORKS[COMPUTING]
    with dtkit.Cluster(2) as cluster:
        part, model = cluster.partition(work.data(), seed=0), cluster.broadcast(work.model())
        for _ in range(ROUNDS):
            equal.append(_measure_share_of_ideal(cluster, model, part, work, dtkit.DataParallel()))
            balanced.append(_measure_share_of_ideal(cluster, model, part, work, dtkit.DataParallel(balance="auto")))
    print(f"  equal shares reach {Sample(equal)} of the ideal; one rank half as fast leaves 2/3 to them")
    return report("throughput with balance='auto', of the ideal", Sample(balanced), least=0.9)


def _measure_share_of_ideal(
    cluster: dtkit.Cluster, model: dtkit.ModelHandle, part: dtkit.Partition, work: Work, strategy: Strategy
) -> float:
    steps = work.warm + work.steps
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": steps}
    run = cluster.train(model, part, start=False, strategy=strategy, **options)
    run.inject_delay(1, SLOWED)
    run.step(work.warm)  # lets the shares settle
    start = time.perf_counter()
    run.step(work.steps)
    seconds = time.perf_counter() - start
    rows = run.history.rows()
    rows = rows[rows["step"] >= work.warm]
    alone = [_compute_samples_per_second(rows[rows["rank"] == rank]) for rank in (0, 1)]
    shares = [int(rows[rows["rank"] == rank]["samples"].sum()) for rank in (0, 1)]
    reached = sum(shares) / seconds
    print(
        f"  {strategy!r}: {reached:,.0f} samples/s, shares {shares[0] / sum(shares):.0%} and "
        f"{shares[1] / sum(shares):.0%}, {1000 * seconds / work.steps:.1f} ms a step; alone {alone[0]:,.0f} and "
        f"{alone[1]:,.0f} samples/s",
        flush=True,
    )
    return reached / sum(alone)


def _compute_samples_per_second(rows: np.ndarray) -> float:
    """Return a rank's speed, without the time that it was blocked and that of the update."""
    seconds = rows["data_s"] + rows["forward_s"] + rows["backward_s"]
    return float(np.median(rows["samples"] / seconds))

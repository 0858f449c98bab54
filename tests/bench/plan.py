"""Step times that `cluster.plan` predicts, next to those of real runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

import dtkit
from tests.bench.pairs import Sample, report
from tests.bench.work import MEDIUM, QUICK, SHORT, WORKS, Work, optimizer

if TYPE_CHECKING:
    from dtkit.planning.plan import Plan
    from dtkit.strategies.base import Strategy

REPEATS = 3
ENDS = (0.67, 1.5)  # of predicted to measured times
_STRATEGIES: tuple[Strategy, ...] = (
    dtkit.DataParallel(),
    dtkit.ParameterAveraging(every=8),
    dtkit.Sharded(),
    dtkit.Pipeline(2, 4),
    dtkit.TensorParallel(2),
)


def plan() -> bool:
    """Compare predicted and measured steps of all strategies and of one process, `REPEATS` times each."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for _ in range(REPEATS):
        for name in (SHORT, QUICK, MEDIUM):
            work = WORKS[name]
            with dtkit.Cluster(2, threads=1) as cluster:
                found = _make_plan(cluster, work)
                for strategy in _STRATEGIES:
                    predicted_s = found.get_rows(strategy)[0].step_s
                    ratios.setdefault((name, repr(strategy)), []).append(
                        _compare(name, repr(strategy), predicted_s, _measure_step(cluster, work, strategy))
                    )
            with dtkit.Cluster(1, threads=1) as single:
                assert found.one_process is not None
                measured_s = _measure_step(single, work, dtkit.DataParallel())
                ratios.setdefault((name, "one process"), []).append(
                    _compare(name, "one process", found.one_process.step_s, measured_s)
                )
    met = [
        report(f"predicted to measured step, {strategy}, {name}", Sample(found), least=ENDS[0], most=ENDS[1])
        for (name, strategy), found in ratios.items()
    ]
    return all(met)


def _make_plan(cluster: dtkit.Cluster, work: Work) -> Plan:
    X, y = work.data()
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch}
    return cluster.plan(work.model(), (X[:512], y[:512]), strategies=_STRATEGIES, **options)


def _measure_step(cluster: dtkit.Cluster, work: Work, strategy: Strategy) -> float:
    """Return the seconds of a step of a run: the mean without its fast and slow tenths."""
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch}
    run = cluster.train(work.model(), work.data(), strategy=strategy, steps=work.warm + work.steps, **options)
    run._driver.wait(300)  # like run.wait(), without its text progress
    seconds = np.sort(run.history.totals()["step_s"][work.warm :])
    tenth = len(seconds) // 10
    return float(seconds[tenth : len(seconds) - tenth].mean())


def _compare(name: str, strategy: str, predicted_s: float, measured_s: float) -> float:
    ratio = predicted_s / measured_s
    print(
        f"  {name}, {strategy}: predicted {1000 * predicted_s:.3g} ms, measured {1000 * measured_s:.3g} ms, "
        f"ratio {ratio:.2f}",
        flush=True,
    )
    return ratio

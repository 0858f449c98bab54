"""`run.verify()` and `run.evaluate` next to the steps that they take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import nn

import dtkit
from tests.bench.pairs import PAIRS, Sample, report
from tests.bench.work import MEDIUM, SHORT, WORKS, Work, optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = {SHORT: 200, MEDIUM: 20}  # of longer ones, rounding grows beyond the tolerance of float32
ROWS = 300
MAX_VERIFY_RATIO = 1.5  # to the time within its steps, with two jobs that are built, and two models that are fetched
MAX_EVALUATION_RATIO = 1.0


def verify() -> bool:
    """Measure both for short and for longer steps, on two engines."""
    met = True
    with dtkit.Cluster(2) as cluster:
        for name in (SHORT, MEDIUM):
            met &= _measure(cluster, name, WORKS[name])
    return met


def _measure(cluster: dtkit.Cluster, name: str, work: Work) -> bool:
    print(name, flush=True)
    steps = STEPS[name]
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": steps}
    run = cluster.train(work.model(), work.data(), **options)
    run._driver.wait(60)
    held_out = cluster.partition(tuple(array[:ROWS] for array in work.data()))
    verified, evaluated = [], []
    for _ in range(PAIRS):
        seconds, result = _time(lambda: run.verify(steps=steps))
        assert result, result.text()
        assert result.step_times is not None
        steps_s = steps * (result.step_times.all_ranks_s + result.step_times.single_process_s)
        verified.append(seconds / steps_s)
        print(f"  verify {steps} steps: {seconds:.3f} s, of which {steps_s:.3f} s are steps", flush=True)
        seconds, _ = _time(lambda: run.evaluate(held_out))
        steps_s = -(-ROWS // work.batch) * result.step_times.all_ranks_s
        evaluated.append(seconds / steps_s)
        print(f"  evaluate {ROWS} rows: {1000 * seconds:.1f} ms; steps over them {1000 * steps_s:.1f} ms", flush=True)
    met = report(f"verify against its steps, {name}", Sample(verified), most=MAX_VERIFY_RATIO)
    limit = MAX_EVALUATION_RATIO if name == MEDIUM else None  # a call takes longer than a few short steps
    return report(f"evaluate against steps over its rows, {name}", Sample(evaluated), most=limit) & met


def _time(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result

"""`run.verify()` and `run.evaluate` next to the steps that they take, and next to calls that take as many steps."""

from __future__ import annotations

import functools
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
MAX_CALL_RATIO = 1.0  # to calls of the user's own that take the same steps


def verify() -> bool:
    """Measure both for short and for longer steps, on two engines."""
    met = True
    with dtkit.Cluster(2) as cluster:
        for name in (SHORT, MEDIUM):
            met &= _measure(cluster, name, WORKS[name])
    return met


def _measure(cluster: dtkit.Cluster, name: str, work: Work) -> bool:
    print(name, flush=True)
    steps, batches = STEPS[name], -(-ROWS // work.batch)
    data, held_out = cluster.partition(work.data()), cluster.partition(tuple(array[:ROWS] for array in work.data()))
    verified, verified_whole, evaluated, evaluated_whole = [], [], [], []
    for _ in range(PAIRS):
        run = _make_run(cluster, work, data, steps=3 * batches)
        run.step(batches)
        stepping_s, _ = _time(functools.partial(run.step, batches))
        calls_s, _ = _time(functools.partial(run.evaluate, held_out))
        training_s, run = _time(lambda: _train(cluster, work, data, steps=steps))
        seconds, result = _time(functools.partial(run.verify, steps=steps))
        assert result, result.text()
        assert result.step_times is not None
        single_s = steps * result.step_times.single_process_s
        steps_s = steps * result.step_times.all_ranks_s + single_s
        verified.append(seconds / steps_s)
        verified_whole.append(seconds / (training_s + single_s))
        print(
            f"  verify {steps} steps: {seconds:.3f} s, of which {steps_s:.3f} s are steps; "
            f"a training of them takes {training_s:.3f} s, and one process {single_s:.3f} s",
            flush=True,
        )
        steps_s = batches * result.step_times.all_ranks_s
        evaluated.append(calls_s / steps_s)
        evaluated_whole.append(calls_s / stepping_s)
        print(
            f"  evaluate {ROWS} rows: {1000 * calls_s:.1f} ms; steps over them {1000 * steps_s:.1f} ms, "
            f"and by step({batches}) {1000 * stepping_s:.1f} ms",
            flush=True,
        )
    met = report(f"verify against its steps, {name}", Sample(verified), most=MAX_VERIFY_RATIO)
    met &= report(f"verify against a training and one process, {name}", Sample(verified_whole), most=MAX_CALL_RATIO)
    limit = MAX_EVALUATION_RATIO if name == MEDIUM else None  # a call takes longer than a few short steps
    met &= report(f"evaluate against steps over its rows, {name}", Sample(evaluated), most=limit)
    return (
        report(f"evaluate against run.step over its rows, {name}", Sample(evaluated_whole), most=MAX_CALL_RATIO) & met
    )


def _make_run(cluster: dtkit.Cluster, work: Work, data: Any, *, steps: int) -> dtkit.Run:
    """Return a run that has not started."""
    return cluster.train(
        work.model(),
        data,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        batch_size=work.batch,
        steps=steps,
        start=False,
    )


def _train(cluster: dtkit.Cluster, work: Work, data: Any, *, steps: int) -> dtkit.Run:
    """Train to the end."""
    run = _make_run(cluster, work, data, steps=steps)
    run.resume()
    run._driver.wait(60)
    return run


def _time(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result

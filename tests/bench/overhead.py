"""Overhead of dtkit in a training: marks, bytes and norms in each step, checksums, and the counts of a stream."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

from torch import nn

import dtkit
from dtkit.engine.comm.process_group import Group
from dtkit.engine.data.iterable import IterableBatches, StreamSource
from dtkit.engine.job import Job
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.rpc.job_plan import JobPlan
from dtkit.strategies.replicated import ReplicatedWorker
from tests.bench import ranks
from tests.bench.pairs import Sample, ratios, report
from tests.bench.work import LONG, WIDE, WORKS, optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DISPATCH, DISPATCHES = 30, 12  # steps, and how many times each way
SECONDS = 30.0  # of training with checksums

# Calls that only serve records, and the norm, which also decides whether the step is taken.
_RECORDING = ((PhaseTimer, "enter"), (Group, "count_sent_bytes"), (Job, "collect_results"))
_NORM = (ReplicatedWorker, "_compute_grad_norm")


def phases() -> bool:
    """Measure the share of records in steps of 20 ms and more: by timing them, and by leaving them out."""
    timings = ranks.run_on_two_ranks("tests.bench.overhead:measure")
    steps = Sample([1000 * seconds for rank in timings for seconds in rank["step"]])
    bare = Sample([1000 * seconds for rank in timings for seconds in rank["bare"]])
    print(f"  {steps} ms a step; without marks, bytes and norms {ratios(bare, steps)} of that")
    print(f"  percent of a step that the norm takes: {Sample([s for rank in timings for s in rank['norm']])}")
    recording = Sample([share for rank in timings for share in rank["recording"]])
    return report("marks, bytes and rows, of a step's time", recording, unit="%", most=1.0)


# -- marks, bytes and norms: on each rank ------------------------------------------------------------------------


def measure(group: Group) -> dict[str, list[float]]:
    """Return, on a rank, the seconds per step with and without records, and the percentage that they take."""
    job = ranks.make_job(group, WORKS[LONG], dtkit.DataParallel())
    ranks.take_steps(job, WORKS[LONG].warm)
    timings: dict[str, list[float]] = {"step": [], "bare": [], "recording": [], "norm": []}
    for _ in range(DISPATCHES):
        with _without_records(job.context.phases):
            timings["bare"].append(_measure_step_s(group, job))
        timings["step"].append(_measure_step_s(group, job))
        with _timed(*_RECORDING) as recording, _timed(_NORM) as norm:
            seconds = DISPATCH * _measure_step_s(group, job)
        timings["recording"].append(100 * sum(recording) / seconds)
        timings["norm"].append(100 * sum(norm) / seconds)
    return timings


def _measure_step_s(group: Group, job: Job) -> float:
    group.barrier()
    start = time.perf_counter()
    ranks.take_steps(job, DISPATCH)
    return (time.perf_counter() - start) / DISPATCH


@contextlib.contextmanager
def _timed(*methods: tuple[type, str]) -> Iterator[list[float]]:
    """Collect the seconds of each call of these methods during the block."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                spent.append(time.perf_counter() - start)

        return call

    with _replaced(*((owner, name, timed(getattr(owner, name))) for owner, name in methods)):
        yield spent


def _without_records(phases: PhaseTimer) -> contextlib.AbstractContextManager[None]:
    """Replace the records during the block; each step gets the marks of an empty step."""
    phases.enter("data")
    marks = phases.end_step()
    return _replaced(
        (PhaseTimer, "enter", lambda *_: None),
        (PhaseTimer, "end_step", lambda _: marks),
        (Group, "count_sent_bytes", lambda _: 0),
        (ReplicatedWorker, "_compute_grad_norm", lambda _: 0.0),
    )


@contextlib.contextmanager
def _replaced(*methods: tuple[type, str, Any]) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in methods]
    for owner, name, method in methods:
        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, method in originals:
            setattr(owner, name, method)


# -- checksums ----------------------------------------------------------------------------------------------------


def fingerprint() -> bool:
    """Measure the share of time of the checksums of 100 MB of parameters, at the usual interval of a run."""
    work, spent = WORKS[WIDE], []
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": 1_000_000}
    with dtkit.Cluster(2) as cluster:
        model = cluster.broadcast(work.model())
        run = cluster.train(model, work.data(), start=False, **options)
        checker = run._driver.replica_check.checker
        on_result = checker.on_result

        def record(now: float, step: int, prints: Any, seconds: float) -> bool:
            spent.extend([seconds] if None not in prints else [])
            return on_result(now, step, prints, seconds)

        checker.on_result = record
        run.step(work.warm)
        spent.clear()
        start = time.perf_counter()
        run.resume()
        run._driver.wait(SECONDS)
        run.pause()
        seconds_total = time.perf_counter() - start
    each = Sample([seconds / model.nbytes * 1e9 for seconds in spent])
    print(f"  {len(spent)} checksums in {seconds_total:.0f} s; seconds per GB: {each}")
    share = Sample([100 * sum(spent) / seconds_total])
    return report("checksums of 100 MB of parameters, of the time", share, unit="%", most=0.5)


# -- the counts of a stream ---------------------------------------------------------------------------------------


def stream() -> bool:
    """Measure the sum of the ranks' sample counts of a stream, once per step. There is no target."""
    times = [
        Sample([1000 * seconds for seconds in rank])
        for rank in ranks.run_on_two_ranks("tests.bench.overhead:measure_counts")
    ]
    print(f"      counts of a stream's samples, per step on each rank: {times[0]} ms, {times[1]} ms", flush=True)
    return True


def measure_counts(group: Group) -> list[float]:
    """Return, on a rank, the seconds of each step's all-reduce of counts."""
    batch = 64
    plan = JobPlan(batch, DISPATCH * DISPATCHES, None, seed=0)
    batches = IterableBatches(
        StreamSource(lambda: iter(range(batch * plan.steps))), plan, group.world_size, [group.rank], group
    )
    with _timed((IterableBatches, "_sum_counts")) as spent:
        for step in range(plan.steps):
            batches.count_samples(step)
    return spent

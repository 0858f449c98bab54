"""What dtkit adds to a training: marks, bytes and norms in every step, checksums now and then, a stream's counts."""

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
from dtkit.strategies.replicated import ReplicatedWorker
from dtkit.types import JobPlan
from tests.bench import ranks
from tests.bench.pairs import Sample, ratios, report
from tests.bench.work import LONG, WIDE, WORKS, optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DISPATCH, DISPATCHES = 30, 12  # steps, and how many times each way
SECONDS = 30.0  # of training with checksums

# What only exists to be looked at, and the norm, which tells whether a step may be taken at all.
_OBSERVING = ((PhaseTimer, "enter"), (Group, "sent_bytes"), (Job, "_rows"))
_NORM = (ReplicatedWorker, "_norm")


def phases() -> bool:
    """The part of a step of 20 ms and more that is spent on looking at it: timed, and by leaving it out."""
    found = ranks.together("tests.bench.overhead:look")
    steps = Sample([1000 * seconds for rank in found for seconds in rank["step"]])
    bare = Sample([1000 * seconds for rank in found for seconds in rank["blind"]])
    print(f"  {steps} ms a step; without marks, bytes and norms {ratios(bare, steps)} of that")
    print(f"  percent of a step that the norm takes: {Sample([s for rank in found for s in rank['norm']])}")
    looking = Sample([share for rank in found for share in rank["looking"]])
    return report("marks, bytes and rows, of a step's time", looking, unit="%", most=1.0)


# -- marks, bytes and norms: on each rank ------------------------------------------------------------------------


def look(group: Group) -> dict[str, list[float]]:
    """On a rank: seconds a step with and without looking, and percent of the time spent on it."""
    job = ranks.job(group, WORKS[LONG], dtkit.DataParallel())
    ranks.take(job, WORKS[LONG].warm)
    found: dict[str, list[float]] = {"step": [], "blind": [], "looking": [], "norm": []}
    for _ in range(DISPATCHES):
        with _blind(job.context.phases):
            found["blind"].append(_seconds_a_step(group, job))
        found["step"].append(_seconds_a_step(group, job))
        with _timed(*_OBSERVING) as looking, _timed(_NORM) as norm:
            taken = DISPATCH * _seconds_a_step(group, job)
        found["looking"].append(100 * sum(looking) / taken)
        found["norm"].append(100 * sum(norm) / taken)
    return found


def _seconds_a_step(group: Group, job: Job) -> float:
    group.barrier()
    begun = time.perf_counter()
    ranks.take(job, DISPATCH)
    return (time.perf_counter() - begun) / DISPATCH


@contextlib.contextmanager
def _timed(*methods: tuple[type, str]) -> Iterator[list[float]]:
    """The seconds of each call of these methods, while it lasts."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                spent.append(time.perf_counter() - begun)

        return call

    with _replaced(*((owner, name, timed(getattr(owner, name))) for owner, name in methods)):
        yield spent


def _blind(phases: PhaseTimer) -> contextlib.AbstractContextManager[None]:
    """Nothing is looked at, while it lasts; every step has the marks of one that did nothing."""
    phases.enter("data")
    marks = phases.end_step()
    return _replaced(
        (PhaseTimer, "enter", lambda *_: None),
        (PhaseTimer, "finish", lambda _: marks),
        (Group, "sent_bytes", lambda _: 0),
        (ReplicatedWorker, "_norm", lambda _: 0.0),
    )


@contextlib.contextmanager
def _replaced(*methods: tuple[type, str, Any]) -> Iterator[None]:
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in methods]
    for owner, name, method in methods:
        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


# -- checksums ----------------------------------------------------------------------------------------------------


def fingerprint() -> bool:
    """The part of the time that checksums of 100 MB of parameters take, as often as a run makes them by itself."""
    work, spent = WORKS[WIDE], []
    how = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": 1_000_000}
    with dtkit.Cluster(2) as cluster:
        copies = cluster.broadcast(work.model())
        run = cluster.train(copies, work.data(), start=False, **how)
        watch = run._driver.replica_check.checker
        landed = watch.on_result

        def listen(now: float, step: int, prints: Any, seconds: float) -> bool:
            spent.extend([seconds] if None not in prints else [])
            return landed(now, step, prints, seconds)

        watch.on_result = listen
        run.step(work.warm)
        spent.clear()
        begun = time.perf_counter()
        run.resume()
        run._driver.wait(SECONDS)
        run.pause()
        taken = time.perf_counter() - begun
    each = Sample([seconds / copies.nbytes * 1e9 for seconds in spent])
    print(f"  {len(spent)} checksums in {taken:.0f} s; seconds per GB: {each}")
    share = Sample([100 * sum(spent) / taken])
    return report("checksums of 100 MB of parameters, of the time", share, unit="%", most=0.5)


# -- the counts of a stream ---------------------------------------------------------------------------------------


def stream() -> bool:
    """Adding up the ranks' counts of a stream's samples, once a step. It has no target: the figure is told."""
    times = [Sample([1000 * seconds for seconds in rank]) for rank in ranks.together("tests.bench.overhead:count")]
    print(f"      counts of a stream's samples, per step on each rank: {times[0]} ms, {times[1]} ms", flush=True)
    return True


def count(group: Group) -> list[float]:
    """On a rank: seconds of each step's all-reduce of counts."""
    batch = 64
    plan = JobPlan(batch, DISPATCH * DISPATCHES, None, seed=0)
    made = IterableBatches(
        StreamSource(lambda: iter(range(batch * plan.steps))), plan, group.world_size, [group.rank], group
    )
    with _timed((IterableBatches, "_added_up")) as spent:
        for step in range(plan.steps):
            made.count_samples(step)
    return spent

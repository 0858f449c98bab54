"""Steps per second of `Pipeline`, `TensorParallel` and `Sharded` next to the same torch engine in a bare loop."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

import dtkit
from tests.bench.pairs import PAIRS, Sample, alternate, ratios, report
from tests.bench.work import (
    HEAVY,
    MEDIUM,
    MICRO_BATCHES,
    PIPELINE,
    QUICK,
    SHARDED,
    TENSOR,
    WORKS,
    Work,
    colwise_rowwise,
    middle,
    optimizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.strategies.base import Strategy

MIN_RATIO = 0.98  # to the bare loop's steps per second, for models that are large enough to be split
LIMIT_S = 300.0

STRATEGIES: dict[str, Callable[[Work], Strategy]] = {
    PIPELINE: lambda work: dtkit.Pipeline(2, MICRO_BATCHES, split=[str(middle(work))]),
    TENSOR: lambda work: dtkit.TensorParallel(2, plan=colwise_rowwise(work)),
    SHARDED: lambda _: dtkit.Sharded(),
}


def strategies() -> bool:
    """Compare all three strategies. Shorter steps have no target."""
    with dtkit.Cluster(2) as cluster:
        met = [_against_bare(cluster, engine, name) for name in (HEAVY, MEDIUM, QUICK) for engine in STRATEGIES]
    return all(met)


def _against_bare(cluster: dtkit.Cluster, engine: str, name: str) -> bool:
    work, title, whole = WORKS[name], f"{engine}, {name}", list[float]()
    print(title, flush=True)
    with _start_bare(engine, name) as reference:
        measured, bare = alternate(
            lambda: _measure_speed(cluster, work, STRATEGIES[engine](work), whole), reference, 2 * PAIRS
        )
    print(f"  {1000 / bare.median:.2f} ms a step under bare torchrun")
    print(f"  whole runs of {work.steps} steps, with a snapshot at the end: {ratios(Sample(whole), bare)}")
    share = f"steps per second against bare torchrun, {title}"
    return report(share, ratios(measured, bare), least=None if name == QUICK else MIN_RATIO)


def _measure_speed(cluster: dtkit.Cluster, work: Work, strategy: Strategy, whole: list[float]) -> float:
    """Return the steps per second of a run, with all records kept; add those of the run with its end to `whole`."""
    steps = work.warm + work.steps
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": steps}
    run = cluster.train(work.model(), work.data(), strategy=strategy, start=False, **options)
    run.step(work.warm)
    start = time.perf_counter()
    run.step(work.steps - 1)
    seconds = time.perf_counter() - start
    run.resume()
    run._driver.wait(LIMIT_S)  # like run.wait(), without its text progress
    whole.append(work.steps / (time.perf_counter() - start))
    assert len(run.history) == 2 * steps
    return (work.steps - 1) / seconds


@contextlib.contextmanager
def _start_bare(engine: str, name: str) -> Iterator[Callable[[], float]]:
    """Start the bare loop, and return a function that takes a window of steps and returns its steps per second."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with tempfile.TemporaryDirectory() as folder, Path(folder, "errors").open("w+") as errors:
        pipe = Path(folder, "pipe")
        os.mkfifo(pipe)
        process = subprocess.Popen(
            [*command, "-m", "tests.bench.bare_engines", engine, name, str(pipe)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with (
            process,
            os.fdopen(os.open(pipe, os.O_RDWR), "w") as lines,
        ):  # opened for both directions, so that open doesn't wait

            def take_window() -> float:
                lines.write("go\n")
                lines.flush()
                assert process.stdout is not None
                figure = process.stdout.readline()
                if not figure:
                    raise RuntimeError(f"the reference failed:\n{Path(errors.name).read_text()[-3000:]}")
                return float(figure)

            try:
                yield take_window
            finally:
                process.terminate()  # torchrun ends its ranks

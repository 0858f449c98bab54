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
from tests.bench.pairs import PAIRS, alternate, ratios, report
from tests.bench.work import (
    BRIEF,
    HEAVY,
    MICRO_BATCHES,
    MIDDLING,
    PIPELINE,
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

LEAST = 0.97  # of the bare loop's steps per second, where a step is as long as that of a model worth taking apart
LIMIT_S = 300.0

STRATEGIES: dict[str, Callable[[Work], Strategy]] = {
    PIPELINE: lambda work: dtkit.Pipeline(2, MICRO_BATCHES, split=[str(middle(work))]),
    TENSOR: lambda work: dtkit.TensorParallel(2, plan=colwise_rowwise(work)),
    SHARDED: lambda _: dtkit.Sharded(),
}


def strategies() -> bool:
    """All three. Shorter steps have no target: the figure is told."""
    with dtkit.Cluster(2) as cluster:
        met = [_against_bare(cluster, engine, name) for name in (HEAVY, MIDDLING, BRIEF) for engine in STRATEGIES]
    return all(met)


def _against_bare(cluster: dtkit.Cluster, engine: str, name: str) -> bool:
    work, what = WORKS[name], f"{engine}, {name}"
    print(what, flush=True)
    with _bare(engine, name) as reference:
        found, bare = alternate(lambda: _steps(cluster, work, STRATEGIES[engine](work)), reference, 2 * PAIRS)
    print(f"  {1000 / bare.median:.2f} ms a step under bare torchrun")
    share = f"steps per second against bare torchrun, {what}"
    return report(share, ratios(found, bare), least=LEAST if name == HEAVY else None)


def _steps(cluster: dtkit.Cluster, work: Work, strategy: Strategy) -> float:
    """As a run takes them by itself, all records kept."""
    steps = work.warm + work.steps
    how = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": steps}
    run = cluster.train(work.model(), work.data(), strategy=strategy, start=False, **how)
    run.step(work.warm)
    begun = time.perf_counter()
    run.resume()
    run._driver.wait(LIMIT_S)  # as run.wait() does, without its text progress
    taken = time.perf_counter() - begun
    assert len(run.history) == 2 * steps
    return work.steps / taken


@contextlib.contextmanager
def _bare(engine: str, name: str) -> Iterator[Callable[[], float]]:
    """A function that has the bare loop take its steps, and returns how many it took per second."""
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
        with process, os.fdopen(os.open(pipe, os.O_RDWR), "w") as lines:  # opened both ways, it waits for nobody

            def window() -> float:
                lines.write("go\n")
                lines.flush()
                assert process.stdout is not None
                figure = process.stdout.readline()
                if not figure:
                    raise RuntimeError(f"the reference failed:\n{Path(errors.name).read_text()[-3000:]}")
                return float(figure)

            try:
                yield window
            finally:
                process.terminate()  # torchrun ends its ranks

"""Steps per second next to bare torchrun: two ranks, all records kept and a dashboard subscribed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from torch import nn

import dtkit
from dtkit.dashboard.live.widget import Dashboard
from tests.bench.pairs import PAIRS, Sample, alternate, ratios, report
from tests.bench.work import LONG, SHORT, WIDE, WORKS, Work, optimizer


def throughput() -> bool:
    """Compare trainings dominated by computing."""
    return _against_bare(SHORT, 0.97) & _against_bare(LONG, 0.99)


def comm() -> bool:
    """Compare a training dominated by communication."""
    return _against_bare(WIDE, 1.10)


def _against_bare(name: str, least: float) -> bool:
    print(name, flush=True)
    work = WORKS[name]
    whole: list[float] = []
    with dtkit.Cluster(2) as cluster:
        part, model = cluster.partition(work.data(), seed=0), cluster.broadcast(work.model())
        measured, bare = alternate(
            lambda: _measure_speed(cluster, model, part, work, whole), lambda: _run_bare(name), PAIRS
        )
    print(f"  {1000 / bare.median:.2f} ms a step under bare torchrun")
    print(f"  whole runs of {work.steps} steps, with a snapshot at the end: {ratios(Sample(whole), bare)}")
    return report(f"steps per second against bare torchrun, {name}", ratios(measured, bare), least=least)


def _measure_speed(
    cluster: dtkit.Cluster, model: dtkit.ModelHandle, part: dtkit.Partition, work: Work, whole: list[float]
) -> float:
    """Return the steps per second of a run in its steady state; add those of the run with its end to `whole`."""
    steps = work.warm + work.steps
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": steps}
    run = cluster.train(model, part, start=False, **options)
    dashboard = Dashboard(run)
    run.step(work.warm)
    start = time.perf_counter()
    run.step(work.steps - 1)
    seconds = time.perf_counter() - start
    run.resume()
    run._driver.wait(600)  # like run.wait(), without its text progress
    whole.append(work.steps / (time.perf_counter() - start))
    assert len(run.history) == 2 * steps
    within = run.history.rows()["step_s"][2 * work.warm : -2].sum() / 2
    print(f"  {within / seconds:.1%} of the time is within steps", flush=True)
    dashboard.close()
    return (work.steps - 1) / seconds


def make_bare_command(name: str) -> list[str]:
    """Return the command of the reference, a loop under torchrun; run it in `make_bare_environment()`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*launcher, "-m", "tests.bench.bare", name]


def make_bare_environment() -> dict[str, str]:
    """Return the environment of the reference."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}


def _run_bare(name: str) -> float:
    out = subprocess.run(
        make_bare_command(name),
        env=make_bare_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if out.returncode:
        raise RuntimeError(f"the reference failed:\n{out.stderr[-3000:]}")
    return float(out.stdout.split()[-1])

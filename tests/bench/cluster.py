"""What a cluster costs: to start and close, to feed, to talk to, in seconds and memory; and that it trains exactly."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from torch import nn

import dtkit
from dtkit.rpc import shared_memory
from tests.bench.pairs import PAIRS, Sample, alternate, ratios, report
from tests.bench.work import SHORT, WORKS, optimizer


def start() -> bool:
    """`Cluster(2)` to the first step's record, and `close()`, in a fresh process each time."""
    code = "import tests.bench.cluster as bench; bench.start_once()"
    first, closed = [], []
    for _ in range(PAIRS):
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
        a, b = map(float, out.stdout.split()[-2:])
        first.append(a)
        closed.append(b)
    print("  to the first record:", *(f"{t:.2f}" for t in first), " close:", *(f"{t:.2f}" for t in closed))
    return report("Cluster(2) to the first step's record", Sample(first), unit="s", most=6.0) & report(
        "close()", Sample(closed), unit="s", most=3.0
    )


def start_once() -> None:
    """One start: prints seconds to the first record, and seconds to close. Raises where something is left."""
    work = WORKS[SHORT]
    model, data = work.model(), work.data()
    files = _shared_files()
    begun = time.perf_counter()
    cluster = dtkit.Cluster(2)
    run = cluster.train(model, data, loss=nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=64, steps=1)
    run._driver.wait(60)
    assert len(run.history) == 2
    first = time.perf_counter() - begun
    family = psutil.Process().children(recursive=True)
    folder = cluster._folder
    begun = time.perf_counter()
    cluster.close()
    closed = time.perf_counter() - begun
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not folder.exists()
    assert _shared_files() == files
    print(first, closed)


def _shared_files() -> set[Path]:
    return {file for folder in shared_memory.get_default_directories() for file in Path(folder).glob("dtkit-*")}


def bulk() -> bool:
    """500 MB of arrays to four engines, next to one plain copy into shared memory; and what memory grows by."""
    data = np.random.default_rng(0).random((500_000, 125))
    labels = np.zeros(len(data), dtype=np.int64)
    with dtkit.Cluster(4) as cluster:
        cluster.partition((data[:1000], labels[:1000]))  # what is loaded once is loaded
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        before = _pss(family)
        keep = cluster.partition((data, labels), labels=None)
        touched = cluster.run(_touch)  # every engine reads what it mapped
        growth = (_pss(family) - before) / data.nbytes
        assert len(touched) == 4
        del keep

        def send() -> float:
            begun = time.perf_counter()
            cluster.partition((data, labels))
            return time.perf_counter() - begun

        found, bare = alternate(send, lambda: _plain_copy(data), PAIRS)
    return report(
        "500 MB to 4 engines, against one plain copy into shared memory", ratios(found, bare), most=2.0
    ) & report("memory of all processes grows by, in sizes of the data", Sample([growth]), most=1.2)


def _touch() -> float:
    from dtkit.engine.session import _session

    source, _ = list(_session._data.values())[-1]
    return float(source._tensors[0].sum())


def _plain_copy(data: np.ndarray) -> float:
    from multiprocessing.shared_memory import SharedMemory

    begun = time.perf_counter()
    block = SharedMemory(create=True, size=data.nbytes)
    np.ndarray(data.shape, data.dtype, block.buf)[:] = data
    taken = time.perf_counter() - begun
    block.close()
    block.unlink()
    return taken


def _pss(processes: list[psutil.Process]) -> int:
    return sum(p.memory_full_info().pss for p in processes if p.is_running())


def dispatches() -> bool:
    """Memory of notebook, hub and engines over 5,000 short dispatches, extrapolated to 100,000."""
    work = WORKS[SHORT]
    with dtkit.Cluster(2) as cluster:
        part = cluster.partition(work.data(), seed=0)
        how = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": 100_000}
        run = cluster.train(work.model(), part, start=False, **how)
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        for _ in range(3000):  # until tables of fixed size (the hub's records) are full and heaps have settled
            run.step()
        before = _pss(family)
        for _ in range(5000):
            run.step()
        growth = 20 * (_pss(family) - before) / 1e6
    return report("memory that 100,000 dispatches add (extrapolated from 5,000)", Sample([growth]), unit="MB", most=100)


def exact() -> bool:
    """50 steps in float64 with momentum on 1 to 4 engines, against a plain loop in one process."""
    from tests.support import oracle

    reference = oracle.one_process(oracle.mlp(), oracle.global_rows)
    differences = []
    for engines in (1, 2, 3, 4):
        with dtkit.Cluster(engines, threads=1) as cluster:
            run = oracle.train(cluster, oracle.mlp(), shuffle="global")
            differences.append(oracle.difference(run.model.state_dict(), reference))
    print("  largest difference with 1, 2, 3 and 4 engines:", *(f"{value:.2g}" for value in differences))
    return report("largest difference of parameters from one process", Sample([max(differences)]), most=1e-12)

"""Costs of a cluster: starting, closing, sending data and dispatches, in seconds and memory; and its exactness."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from torch import nn

import dtkit
from dtkit.dashboard.live.widget import Dashboard
from dtkit.rpc import shared_memory
from tests.bench.pairs import PAIRS, Sample, alternate, ratios, report
from tests.bench.speed import make_bare_command, make_bare_environment
from tests.bench.work import FIRST, SHORT, WORKS, Work, optimizer

SHARE_S, SHARE_WARM_STEPS = 3.0, 500


def start() -> bool:
    """Measure `Cluster(2)` up to the first record, the next training, and `close()`, each time in a new process.

    The reference is torchrun with the same training, from its command to the first step. It scales with the machine.
    """
    following, closed = [], []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compileall.compile_dir(Path(dtkit.__file__).parent, quiet=1)  # as pip does

    def measure_first() -> float:
        code = "import tests.bench.cluster as bench; bench.start_once()"
        out = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=120
        )
        first_s, following_s, close_s = map(float, out.stdout.split()[-3:])
        following.append(following_s)
        closed.append(close_s)
        return first_s

    first, bare = alternate(measure_first, _start_bare, PAIRS)
    met = report("Cluster(2) to the first step's record", first, unit="s", most=3.5)
    print(f"  torchrun to the first step: {bare} s")
    met &= report("time to the first step, as a share of torchrun's", ratios(first, bare), most=1.0)
    met &= report("the next training, to its first step's record", Sample(following), unit="s", most=0.15)
    return report("close()", Sample(closed), unit="s", most=3.0) & met


def _start_bare() -> float:
    """Return the seconds from the command of torchrun to the end of its first step."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        make_bare_command(FIRST), env=make_bare_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    printed = process.stdout.readline()
    seconds = time.perf_counter() - begin
    if process.wait(60) or not printed:
        raise RuntimeError(f"the reference ended with {process.returncode}")
    return seconds


def start_once() -> None:
    """Print the seconds to the first record, to that of the next run, and to close. Raise if anything is left."""
    work = WORKS[SHORT]
    model, data = work.model(), work.data()
    files = _shared_files()
    start = time.perf_counter()
    cluster = dtkit.Cluster(2)
    seconds = []
    for _ in range(2):
        run = cluster.train(model, data, loss=nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=64, steps=1)
        run._driver.wait(60)
        assert len(run.history) == 2
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    processes = psutil.Process().children(recursive=True)
    folder = cluster.folder
    start = time.perf_counter()
    cluster.close()
    closed = time.perf_counter() - start
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not folder.exists()
    assert _shared_files() == files
    print(*seconds, closed)


def _shared_files() -> set[Path]:
    return {file for folder in shared_memory.get_default_directories() for file in Path(folder).glob("dtkit-*")}


def share() -> bool:
    """Measure the notebook's processor time while eight engines take steps of about a millisecond."""
    work = Work(width=16, depth=1, batch=64, steps=0)
    with dtkit.Cluster(8, threads=1) as cluster:
        part = cluster.partition(work.data(), seed=0)
        options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": 1_000_000}
        run = cluster.train(work.model(), part, start=False, **options)
        dashboard = Dashboard(run)
        run.step(SHARE_WARM_STEPS)
        run.resume()
        shares = [_measure_own_share(SHARE_S) for _ in range(PAIRS)]
        run.stop()
        dashboard.close()
        median = float(np.median(run.history.rows()["step_s"]))
    print(f"  {1000 * median:.2f} ms a step, {os.cpu_count()} cores")
    return report("the notebook's share of a core, with 8 engines", Sample(shares), unit="%", most=5.0)


def _measure_own_share(seconds: float) -> float:
    """Return the percentage of a core that this process uses."""
    start, cpu_start = time.perf_counter(), time.process_time()
    # sleeps: the run goes on in threads
    time.sleep(seconds)
    return 100 * (time.process_time() - cpu_start) / (time.perf_counter() - start)


def bulk() -> bool:
    """Send 500 MB of arrays to four engines, next to a plain copy into shared memory, and measure the memory growth."""
    data = np.random.default_rng(0).random((500_000, 125))
    labels = np.zeros(len(data), dtype=np.int64)
    with dtkit.Cluster(4) as cluster:
        cluster.partition((data[:1000], labels[:1000]))  # loads the modules that this needs
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        before = _measure_pss(processes)
        handle = cluster.partition((data, labels), labels=None)
        sums = cluster.run(_sum_data)  # each engine reads all that it mapped
        growth = (_measure_pss(processes) - before) / data.nbytes
        assert len(sums) == 4
        del handle

        def send() -> float:
            start = time.perf_counter()
            cluster.partition((data, labels))
            return time.perf_counter() - start

        sending, copying = alternate(send, lambda: _copy_to_shared_memory(data), PAIRS)
    return report(
        "500 MB to 4 engines, against one plain copy into shared memory", ratios(sending, copying), most=2.0
    ) & report("memory of all processes grows by, in sizes of the data", Sample([growth]), most=1.2)


def _sum_data() -> float:
    from dtkit.engine.session import get_session

    source, _ = list(get_session().state.data.values())[-1]
    return float(source._tensors[0].sum())


def _copy_to_shared_memory(data: np.ndarray) -> float:
    from multiprocessing.shared_memory import SharedMemory

    start = time.perf_counter()
    block = SharedMemory(create=True, size=data.nbytes)
    np.ndarray(data.shape, data.dtype, block.buf)[:] = data
    seconds = time.perf_counter() - start
    block.close()
    block.unlink()
    return seconds


def _measure_pss(processes: list[psutil.Process]) -> int:
    return sum(p.memory_full_info().pss for p in processes if p.is_running())


def dispatches() -> bool:
    """Measure the memory growth over 5,000 short dispatches, extrapolated to 100,000."""
    work = WORKS[SHORT]
    with dtkit.Cluster(2) as cluster:
        part = cluster.partition(work.data(), seed=0)
        options = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch, "steps": 100_000}
        run = cluster.train(work.model(), part, start=False, **options)
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        for _ in range(3000):  # fills tables of fixed size, such as the hub's records
            run.step()
        before = _measure_pss(processes)
        for _ in range(5000):
            run.step()
        growth = 20 * (_measure_pss(processes) - before) / 1e6
    return report("memory that 100,000 dispatches add (extrapolated from 5,000)", Sample([growth]), unit="MB", most=100)


def exact() -> bool:
    """Compare 50 steps in float64 with momentum on 1 to 4 engines with a plain loop in one process."""
    from tests.support import oracle

    reference = oracle.train_in_one_process(oracle.mlp(), oracle.get_global_rows)
    differences = []
    for engines in (1, 2, 3, 4):
        with dtkit.Cluster(engines, threads=1) as cluster:
            run = oracle.train(cluster, oracle.mlp(), shuffle="global")
            differences.append(oracle.max_difference(run.model.state_dict(), reference))
    print("  largest difference with 1, 2, 3 and 4 engines:", *(f"{value:.2g}" for value in differences))
    return report("largest difference of parameters from one process", Sample([max(differences)]), most=1e-12)

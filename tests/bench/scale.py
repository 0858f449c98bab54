"""How start, calls and the notebook's work grow with the number of engines.

`python -m tests.bench scale` measures up to 16 engines. `python -m tests.bench.scale FOLDER` measures up to 128, and
writes the table and the picture of docs/scale.md there. Each number of engines runs in a new process.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

import dtkit
from dtkit.history.history import ROW_DTYPE, History
from dtkit.testing.fake_transport import FakeTransport
from tests.bench.pairs import Sample, report

ENGINES = (2, 4, 8, 16, 32, 64, 128)
SIMULATED = (2, 16, 64, 256, 1024)
CALLS = 20
TIMEOUT_S = 280.0
STEPS_A_DISPATCH = 10


@dataclasses.dataclass
class Measurement:
    """One cluster. Times are in seconds, memory in MB."""

    engines: int
    start_s: float
    """Until `Cluster` returns: started, connected, process group formed."""
    call_s: float
    """Median of a `cluster.run` of a function that does nothing."""
    controller_start_s: float
    """Processor time of the controller's processes, from their start to the first call."""
    controller_call_s: float
    """The same for one call of all engines."""
    engines_mb: float
    """Engines with their nannies and the fork server; shared pages are divided among processes."""
    controller_mb: float
    close_s: float


def scale() -> bool:
    """Measure up to 16 engines, and simulated ranks."""
    print_table([measure(n) for n in ENGINES if n <= 16])
    return simulate()


def measure(n: int) -> Measurement:
    """Measure a cluster of `n` engines in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.scale", "--one", str(n)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
    return Measurement(**json.loads(out.stdout.splitlines()[-1]))


def measure_here(n: int) -> Measurement:
    """Start, call and close a cluster of `n` engines."""
    start = time.perf_counter()
    cluster = dtkit.Cluster(n, threads=1, timeout=TIMEOUT_S)
    start_s = time.perf_counter() - start
    engines = [psutil.Process(node.pid) for node in cluster.nodes]
    controller = find_controller(cluster.folder)
    at_start = sum_cpu(controller)
    calls = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        cluster.run(do_nothing)
        calls.append(time.perf_counter() - begin)
    processes = {*engines, *(child for engine in engines for child in engine.children())}
    if (parent := engines[0].parent()) is not None:
        processes.add(parent)
    fields = Measurement(
        engines=n,
        start_s=start_s,
        call_s=float(np.median(calls)),
        controller_start_s=at_start,
        controller_call_s=(sum_cpu(controller) - at_start) / CALLS,
        engines_mb=sum_pss(processes),
        controller_mb=sum_pss(set(controller)),
        close_s=0.0,
    )
    begin = time.perf_counter()
    cluster.close()
    return dataclasses.replace(fields, close_s=time.perf_counter() - begin)


def do_nothing() -> None:
    """Return at once."""


def find_controller(folder: Path) -> list[psutil.Process]:
    """Return the controller's processes: hub, schedulers and heartbeats."""
    children = psutil.Process().children(recursive=True)
    roots = [p for p in children if "ipyparallel.controller" in p.cmdline() and str(folder) in p.environ().values()]
    return list({*roots, *(child for root in roots for child in root.children(recursive=True))})


def sum_cpu(processes: list[psutil.Process]) -> float:
    """Return the processor time of processes, in seconds."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def sum_pss(processes: set[psutil.Process]) -> float:
    """Return the memory of processes, in MB."""
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def print_table(measurements: list[Measurement]) -> None:
    """Print the measurements as a Markdown table."""
    for line in format_table(measurements):
        print(line)


def format_table(measurements: list[Measurement]) -> list[str]:
    """Return the lines of a Markdown table."""
    header = "| engines | start, s | controller's CPU for it, s | a call, ms | controller's CPU for a call, ms | "
    header += "engines, MB | controller, MB | close, s |"
    lines = [header, "|" + "---|" * 8]
    for m in measurements:
        lines.append(
            f"| {m.engines} | {m.start_s:.1f} | {m.controller_start_s:.2f} | {1000 * m.call_s:.0f} | "
            f"{1000 * m.controller_call_s:.1f} | {m.engines_mb:.0f} | {m.controller_mb:.0f} | {m.close_s:.1f} |"
        )
    return lines


# -- simulated ranks ------------------------------------------------------------------------------------------


def simulate() -> bool:
    """Measure the notebook's own work for a call and for the rows of a dispatch, without engines' processes."""
    is_met = True
    for n in SIMULATED:
        fan_out, rows = Sample(measure_fan_out(n)), Sample(measure_rows(n))
        print(f"  {n} ranks: a call {1000 * fan_out.median:.2f} ms, rows of a dispatch {1000 * rows.median:.2f} ms")
        is_met = report(f"notebook's work a dispatch of {n} ranks", fan_out, unit="s", most=0.5)
    return is_met


def measure_fan_out(n: int) -> list[float]:
    """Return the seconds of processor time that the calling thread spends on one call of `n` fake engines."""
    seconds = []
    with dtkit.Cluster.from_transport(FakeTransport(n), device="cpu") as cluster:
        for _ in range(CALLS):
            start = time.thread_time()
            cluster.refresh_nodes()
            seconds.append(time.thread_time() - start)
    return seconds


def measure_rows(n: int) -> list[float]:
    """Return the seconds to append the rows of one dispatch of `n` ranks."""
    history, seconds = History(), []
    for k in range(CALLS):
        rows = np.zeros(STEPS_A_DISPATCH * n, ROW_DTYPE)
        rows["step"] = np.repeat(np.arange(STEPS_A_DISPATCH) + k * STEPS_A_DISPATCH, n)
        rows["rank"] = np.tile(np.arange(n), STEPS_A_DISPATCH)
        start = time.thread_time()
        history.append(rows)
        seconds.append(time.thread_time() - start)
    return seconds


# -- the page -------------------------------------------------------------------------------------------------


def write_page_material(folder: Path) -> None:
    """Measure all sizes, and write the table and the picture of docs/scale.md."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    measurements: list[Measurement] = []
    for n in ENGINES:
        try:
            measurements.append(measure(n))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{n} engines: {error}")
            break
        print_table(measurements[-1:])
    (folder / "scale.md").write_text("\n".join(format_table(measurements)) + "\n")
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    engines = [m.engines for m in measurements]
    for axis, title, values in (
        (axes[0], "start, s", [m.start_s for m in measurements]),
        (axes[1], "a call of all engines, ms", [1000 * m.call_s for m in measurements]),
        (axes[2], "memory of all engines, GB", [m.engines_mb / 1000 for m in measurements]),
    ):
        axis.plot(engines, values, "o-", color="#1f6feb")
        axis.set(xlabel="engines", title=title, xscale="log", xticks=engines, xticklabels=engines, ylim=(0, None))
        axis.minorticks_off()
    figure.savefig(folder / "scale.svg")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(dataclasses.asdict(measure_here(int(sys.argv[2])))))
    else:
        write_page_material(Path(sys.argv[1]))

"""Cost of experiment trackers: steps per second and CPU time, with a tracker and without."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import psutil
from torch import nn

import dtkit
from dtkit.integrations.trackers import TensorBoard, Wandb
from tests.bench.pairs import PAIRS, alternate, ratios, report
from tests.bench.work import SHORT, WORKS, Work, optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 6


def trackers() -> bool:
    """Compare trainings with TensorBoard and Weights & Biases (offline) to trainings without."""
    work = WORKS[SHORT]
    with dtkit.Cluster(2) as cluster, tempfile.TemporaryDirectory() as folder:
        part, model = cluster.partition(work.data(), seed=0), cluster.broadcast(work.model())
        met = True
        for name, make in (
            ("W&B", lambda: Wandb(folder=folder, report=False)),
            ("TensorBoard", lambda: TensorBoard(folder, report=False)),
        ):
            met &= _compare(name, make, lambda tracker: _measure(cluster, model, part, work, tracker))
    return met


def _compare(name: str, make: Callable[[], Any], measure: Callable[[Any], tuple[float, float]]) -> bool:
    cpu: dict[bool, list[float]] = {False: [], True: []}

    def measure_speed(has_tracker: bool) -> float:  # noqa: FBT001 - the two sides of the pair
        speed, cpu_share = measure(make() if has_tracker else None)
        cpu[has_tracker].append(cpu_share)
        return speed

    with_tracker, without = alternate(lambda: measure_speed(True), lambda: measure_speed(False), PAIRS)
    cost = [a - b for a, b in zip(cpu[True], cpu[False], strict=True)]
    print(f"  CPU of the notebook and its processes, in cores: {sorted(cost)[len(cost) // 2]:.4f} more")
    return report(f"steps per second with {name} against without", ratios(with_tracker, without), least=0.99)


def _measure(
    cluster: dtkit.Cluster, model: dtkit.ModelHandle, part: dtkit.Partition, work: Work, tracker: Any
) -> tuple[float, float]:
    """Return steps per second, and CPU time of the notebook and of the tracker's processes per second."""
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch}
    callbacks = [] if tracker is None else [tracker]
    run = cluster.train(model, part, start=False, steps=10**6, callbacks=callbacks, **options)
    run.step(work.warm)
    cpu_s, start, first = _read_cpu(), time.perf_counter(), run.status.step
    run.resume()
    # sleeps: the training is measured for this long
    time.sleep(_SECONDS)
    run.pause()
    seconds, steps, used_s = time.perf_counter() - start, run.status.step - first, _read_cpu() - cpu_s
    run.stop()
    return steps / seconds, used_s / seconds


def _read_cpu() -> float:
    """Return the CPU seconds of this process and of W&B's service."""
    total = sum(psutil.Process().cpu_times()[:2])
    for child in psutil.Process().children(recursive=True):
        if "wandb" in child.name() or "gpu_stats" in child.name():
            total += sum(child.cpu_times()[:2])
    return total

"""Cost of experiment trackers: CPU time, delay of the run's driver, and steps per second next to the noise.

A tracker can slow a training only by the CPU time that it takes, and by delaying the driver. Both are measured
directly, and have a target. Steps per second are shown too, next to those of pairs without any tracker: on a shared
machine, they differ by more than a tracker costs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
from torch import nn

import dtkit
from dtkit.integrations.trackers import MLflow, TensorBoard, Trackio, Wandb, feed
from tests.bench.pairs import Sample, alternate, ratios, report
from tests.bench.work import SHORT, WORKS, Work, optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECONDS, _PAIRS = 4, 5
_LIMIT = 0.01  # of the time
_delays: list[float] = []


def trackers() -> bool:
    """Compare trainings with each installed tracker to trainings without."""
    work, met = WORKS[SHORT], True
    # The cluster is closed before its folder is deleted: closing waits for trackers.
    with tempfile.TemporaryDirectory() as folder, dtkit.Cluster(2) as cluster, _time_driver():
        os.environ["TRACKIO_DIR"] = folder  # read when trackio is imported
        part, model = cluster.partition(work.data(), seed=0), cluster.broadcast(work.model())
        made: dict[str, tuple[str, Callable[[], Any]]] = {
            "no tracker": ("torch", lambda: None),
            "TensorBoard": ("tensorboard", lambda: TensorBoard(folder, report=False)),
            "W&B": ("wandb", lambda: Wandb(folder=folder, report=False)),
            "MLflow": ("mlflow", lambda: MLflow(tracking_uri=f"sqlite:///{folder}/mlflow.db", report=False)),
            "Trackio": ("trackio", lambda: Trackio("bench", report=False)),
        }
        for name, (package, make) in made.items():
            if importlib.util.find_spec(package) is None:
                print(f"  {package} is not installed: {name} is not measured")
                continue
            met &= _compare(name, make, lambda tracker: _measure(cluster, model, part, work, tracker))
    return met


def _compare(name: str, make: Callable[[], Any], measure: Callable[[Any], tuple[float, float, float]]) -> bool:
    cpu: dict[bool, list[float]] = {False: [], True: []}
    delays: list[float] = []

    def measure_speed(has_tracker: bool) -> float:  # noqa: FBT001 - the two sides of the pair
        speed, cpu_share, delay = measure(make() if has_tracker else None)
        cpu[has_tracker].append(cpu_share)
        if has_tracker:
            delays.append(delay)
        return speed

    print(name, flush=True)
    measured, without = alternate(lambda: measure_speed(True), lambda: measure_speed(False), _PAIRS)
    print(f"  steps per second with {name} against without: {ratios(measured, without)}")
    expected = statistics.median(cpu[False])
    more = Sample([value - expected for value in cpu[True]])
    met = report(f"more CPU of the notebook and its processes with {name}", more, unit="cores", most=_LIMIT)
    return report(f"delay of the driver by {name}", Sample(delays), unit="of the time", most=_LIMIT / 10) and met


def _measure(
    cluster: dtkit.Cluster, model: dtkit.ModelHandle, part: dtkit.Partition, work: Work, tracker: Any
) -> tuple[float, float, float]:
    """Return steps per second, CPU time of the notebook and of the tracker's processes, and the driver's delay."""
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer, "batch_size": work.batch}
    callbacks = [] if tracker is None else [tracker]
    run = cluster.train(model, part, start=False, steps=10**6, callbacks=callbacks, **options)
    run.step(work.warm)
    _delays.clear()
    cpu_s, start, first = _read_cpu(), time.perf_counter(), run.status.step
    run.resume()
    # sleeps: the training is measured for this long
    time.sleep(_SECONDS)
    run.pause()
    seconds, steps, used_s = time.perf_counter() - start, run.status.step - first, _read_cpu() - cpu_s
    delay_s = sum(_delays)
    run.stop()
    if tracker is not None:
        tracker.finish_writing(30)  # else it would write during the next training
    return steps / seconds, used_s / seconds, delay_s / seconds


@contextlib.contextmanager
def _time_driver() -> Iterator[None]:
    """Note the time that trackers take on the driver's thread."""
    notify = feed.RunFeed.notify

    def timed_notify(self: feed.RunFeed) -> None:
        start = time.perf_counter()
        notify(self)
        _delays.append(time.perf_counter() - start)

    with mock.patch.object(feed.RunFeed, "notify", timed_notify):
        yield


def _read_cpu() -> float:
    """Return the CPU seconds of this process and of W&B's service."""
    total = sum(psutil.Process().cpu_times()[:2])
    for child in psutil.Process().children(recursive=True):
        if "wandb" in child.name() or "gpu_stats" in child.name():
            total += sum(child.cpu_times()[:2])
    return total

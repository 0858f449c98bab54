"""Times to detect a lost or stuck engine, and to take the next step after the repair."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from torch import nn

import dtkit
from tests.bench.pairs import Sample, report
from tests.bench.work import SHORT, WORKS, optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.types import Event

KILLS, FAULTS = 7, 20
SIZES = (2, 4, 8)
COLD_S, SPARE_S = 8.0, 2.0
KILLED_S, STUCK_S = 1.0, 10.0
_LIMIT_S = 120.0
_MANY = 1_000_000  # steps


def recovery() -> bool:
    """Measure from SIGKILL to the next step, on 4 engines: with a new engine, and with a spare."""
    met = True
    for spares, most in ((0, COLD_S), (1, SPARE_S)):
        with dtkit.Cluster(4, threads=1, spares=spares) as cluster:
            run = _start(cluster)
            seconds = [_recover(cluster, run, k % 4) for k in range(KILLS)]
            run.stop()
        print(f"  with {spares} spare:", *(f"{value:.2f}" for value in seconds))
        met &= report(f"kill to next step, 4 engines, spares={spares}", Sample(seconds), unit="s", most=most)
    return met


def recovery_by_size() -> bool:
    """Measure from SIGKILL to the next step, with a new engine, on 2, 4 and 8 engines."""
    for n in SIZES:
        with dtkit.Cluster(n, threads=1) as cluster:
            run = _start(cluster)
            sample = Sample([_recover(cluster, run, k % n) for k in range(KILLS)])
            run.stop()
        print(f"  {n} engines, seconds: {sample}", flush=True)
    return True


def detection() -> bool:
    """Measure from SIGKILL and from SIGSTOP to the entry in the run's log. The worst case counts."""
    met = True
    with dtkit.Cluster(2, threads=1, spares=1) as cluster:
        run = _start(cluster)
        for name, most, cause in (("killed", KILLED_S, _kill), ("stuck", STUCK_S, _freeze)):
            seconds = [cause(cluster, run, k % 2) for k in range(FAULTS)]
            sample = Sample(seconds)
            print(f"  {name}: median {sample.median:.2f} s, worst {max(seconds):.2f} s of {FAULTS}")
            met &= report(f"detection of a {name} engine, worst case", Sample([max(seconds)]), unit="s", most=most)
        run.stop()
    return met


def _start(cluster: dtkit.Cluster) -> dtkit.Run:
    work = WORKS[SHORT]
    options: dict[str, Any] = {"optimizer": optimizer, "batch_size": work.batch, "steps": _MANY}
    run = cluster.train(work.model(), cluster.partition(work.data(), seed=0), loss=nn.CrossEntropyLoss(), **options)
    _wait_until(lambda: run.status.step > 20)
    return run


def _recover(cluster: dtkit.Cluster, run: dtkit.Run, rank: int) -> float:
    """Return the seconds from the end of a rank's process to the next step of all."""
    _wait_until_ready(cluster)
    at = _signal(cluster, rank, signal.SIGKILL)
    _wait_for_event(run, "repair", at)
    step = run.status.step
    _wait_until(lambda: run.status.step > step)
    return time.time() - at


def _kill(cluster: dtkit.Cluster, run: dtkit.Run, rank: int) -> float:
    _wait_until_ready(cluster)
    at = _signal(cluster, rank, signal.SIGKILL)
    seconds = _wait_for_event(run, "lost", at).time - at
    _wait_for_event(run, "repair", at)
    return seconds


def _freeze(cluster: dtkit.Cluster, run: dtkit.Run, rank: int) -> float:
    step = run.status.step
    _wait_until(lambda: run.status.step > step)
    at = _signal(cluster, rank, signal.SIGSTOP)
    try:
        return _wait_for_event(run, "stuck", at, "lost").time - at  # "lost" if its heartbeats end first
    finally:
        os.kill(cluster.nodes[rank].pid, signal.SIGCONT)


def _wait_until_ready(cluster: dtkit.Cluster) -> None:
    """Wait until the spare engine, if there is one, has started and has loaded torch."""
    _wait_until(lambda: not any(thread.name == "dtkit-spares" for thread in threading.enumerate()))
    transport = cluster._engine_group.transport
    if transport.spare_ids:
        transport._client.direct_view(transport.spare_ids).apply_async(os.getpid).get(timeout=_LIMIT_S)


def _signal(cluster: dtkit.Cluster, rank: int, number: signal.Signals) -> float:
    at = time.time()
    os.kill(cluster.nodes[rank].pid, number)
    return at


def _wait_for_event(run: dtkit.Run, kind: str, since: float, *others: str) -> Event:
    """Wait for the first event of one of these kinds since a time, and return it."""
    kinds = (kind, *others)

    def find() -> Event | None:
        return next((event for event in run.history.events if event.kind in kinds and event.time >= since), None)

    event: Event = _wait_until(find)
    return event


def _wait_until(condition: Callable[[], Any]) -> Any:
    deadline, pause = time.monotonic() + _LIMIT_S, threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_LIMIT_S:g} s")
        pause.wait(0.005)
    return value

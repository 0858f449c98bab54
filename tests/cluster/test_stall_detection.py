"""Stuck ranks on real engines: which rank is reported, with which phase and line.

Engines write their status twice a second, so most tests use limits of 1.5 s. One test uses the default limits.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtkit
from dtkit.health import stacks
from dtkit.health.detector import DetectorConfig, StallDetector
from tests.support import small
from tests.support.marks import slow
from tests.support.waiting import ends_soon, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.health.stall_report import StallReport
    from dtkit.types import Event

pytestmark = pytest.mark.cluster

QUICK = DetectorConfig(min_limit_s=1.5)  # longer than the age of a status, so that none is from before the dispatch
MANY = 100_000  # steps: more than a test waits for


@pytest.fixture(scope="module")
def cluster3() -> Iterator[dtkit.Cluster]:
    """Three engines, since two would be too simple a case."""
    with dtkit.Cluster(3, threads=1) as started:
        yield started


@pytest.fixture(autouse=True)
def _stop_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stop the run of a failed test, so that the next tests don't fail."""
    clusters = [request.getfixturevalue(name) for name in {"cluster2", "cluster3"} & set(request.fixturenames)]
    yield
    for cluster in clusters:
        run = cluster.current_run
        if run is not None and not run.status.state.has_ended:
            run.stop()


@pytest.fixture
def flag(tmp_path: Path) -> Iterator[Path]:
    """File that makes a rank misbehave while it exists."""
    path = tmp_path / "stuck"
    yield path
    path.unlink(missing_ok=True)


def wait_for_report(
    cluster: dtkit.Cluster, limits: DetectorConfig = QUICK, kind: str = "stuck"
) -> tuple[StallReport, StallDetector]:
    """Return the first report of that kind, for a dispatch that is sent now, and the detector."""
    detector = StallDetector(stacks.StatusProbe(cluster.folder, lambda: cluster.nodes), limits)
    detector.on_sent(time.monotonic())

    def find() -> StallReport | None:
        report = detector.check(time.monotonic())
        return report if report is not None and report.kind == kind else None

    return wait_until(find), detector


def wait_for_recovery(detector: StallDetector) -> StallReport:
    report: StallReport = wait_until(lambda: detector.check(time.monotonic()))
    return report


def check_line(report: StallReport, function: Callable[..., Any], text: str) -> None:
    """Check that the reported line is in `function` and has `text`."""
    place, _, name = report.location.partition(" in ")
    file, _, line = place.rpartition(":")
    assert Path(file).name == "test_stall_detection.py"
    assert name == function.__name__
    lines, first = inspect.getsourcelines(function)
    assert text in lines[int(line) - first]


def make_step(misbehave: Callable[[Path], None], flag: Path, rank: int = 1) -> Callable[..., torch.Tensor]:
    """Return a training step in which a rank misbehaves while the file exists."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        if dist.get_rank() == rank and flag.exists():
            misbehave(flag)
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    return step


def loop_forever(flag: Path) -> None:
    while flag.exists():
        pass


def wait_for_a_lock(flag: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    while flag.exists():
        lock.acquire(timeout=0.2)


def block_interpreter(flag: Path) -> None:
    """Block the interpreter in C for about eight seconds, without a system call that a signal would end."""
    flag.unlink()
    count, start = 10_000_000, time.perf_counter()
    collections.deque(itertools.repeat(0, count), maxlen=0)
    count = int(count * 8 / (time.perf_counter() - start))
    collections.deque(itertools.repeat(0, count), maxlen=0)


@pytest.mark.parametrize(
    ("misbehave", "text"), [(loop_forever, "flag.exists()"), slow(wait_for_a_lock, "lock.acquire(timeout")]
)
def test_endless_step_is_reported_with_rank_and_line(cluster3: dtkit.Cluster, flag: Path, misbehave: Any, text: str):
    run = small.train(cluster3, training_step=make_step(misbehave, flag), loss=None, steps=MANY)
    wait_until(lambda: run.status.step)
    flag.touch()
    report, detector = wait_for_report(cluster3)
    assert (report.rank, report.phase) == (1, "forward")
    check_line(report, misbehave, text)
    shown = cluster3.stacks()
    assert [rank.status is not None and rank.status.is_blocked for rank in shown.ranks] == [True, False, True]
    assert misbehave.__name__ in repr(shown)
    assert "waiting in a collective" in repr(shown)
    flag.unlink()
    assert wait_for_recovery(detector).reason.startswith("rank 1 goes on after")
    run.stop()
    small.check_usable(cluster3)


@pytest.mark.slow
def test_rank_whose_interpreter_is_blocked_is_reported(cluster2: dtkit.Cluster, flag: Path):
    run = small.train(cluster2, training_step=make_step(block_interpreter, flag), loss=None, steps=MANY)
    wait_until(lambda: run.status.step)
    flag.touch()
    report, _ = wait_for_report(cluster2)
    assert report.rank == 1
    assert "C code holds its interpreter" in report.reason
    check_line(report, block_interpreter, "collections.deque(")
    run.stop(timeout=60)  # a machine that gets busy meanwhile blocks for longer


def test_stopped_rank_is_reported_and_training_is_unchanged(cluster2: dtkit.Cluster):
    undisturbed = small.train(cluster2, steps=400)
    undisturbed.wait(120)
    run = small.train(cluster2, steps=400)
    wait_until(lambda: run.status.step)
    process = psutil.Process(cluster2.nodes[1].pid)
    process.suspend()
    try:
        report, detector = wait_for_report(cluster2)
        shown = repr(cluster2.stacks())
    finally:
        process.resume()
    assert (report.rank, report.kind) == (1, "stuck")
    assert f"kill -CONT {process.pid}" in report.remedy
    assert "stopped (SIGSTOP), last seen in" in shown
    assert wait_for_recovery(detector).kind == "recovered"
    run.wait(120)
    check_same_state(run, undisturbed)


def check_same_state(run: dtkit.Run, other: dtkit.Run) -> None:
    state, expected = run.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_reading_stacks_does_not_change_the_training(cluster2: dtkit.Cluster):
    undisturbed = small.train(cluster2, steps=1000)
    undisturbed.wait(120)
    run = small.train(cluster2, steps=1000, start=False)
    samples: list[stacks.Stacks] = []

    def read_stacks() -> None:
        samples.extend(cluster2.stacks() for _ in range(20))

    thread = threading.Thread(target=read_stacks)
    thread.start()
    run.resume()
    run.wait(120)
    thread.join(120)
    assert len(samples) == 20
    assert any(sample[rank] for sample in samples for rank in range(2))
    check_same_state(run, undisturbed)


def wait_for_rank_1() -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(torch.zeros(2))


def wait_for_rank_0(flag: Path) -> None:
    if dist.get_rank() == 0:
        sleep_long(flag)
    dist.all_reduce(torch.zeros(2), async_op=True).wait()


def sleep_long(flag: Path) -> None:
    while flag.exists():
        threading.Event().wait(0.2)


def interrupt_task(cluster: dtkit.Cluster, task: Any) -> None:
    cluster.interrupt()
    with pytest.raises(dtkit.errors.EngineError):
        task.result(timeout=60)
    small.check_usable(cluster)


def test_rank_that_never_calls_the_collective_is_reported(cluster3: dtkit.Cluster):
    task = cluster3.submit(wait_for_rank_1)
    report, _ = wait_for_report(cluster3)
    assert (report.rank, report.phase) == (1, "idle")
    assert "has returned from the call" in report.reason
    interrupt_task(cluster3, task)


def test_rank_busy_outside_the_collective_is_reported(cluster3: dtkit.Cluster, flag: Path):
    """torch's collective counts identify the rank; the others wait in the collective."""
    flag.touch()
    task = cluster3.submit(wait_for_rank_0, flag)
    report, _ = wait_for_report(cluster3)
    assert (report.rank, report.phase) == (0, "call_function")
    check_line(report, sleep_long, "wait(0.2)")
    flag.unlink()
    task.result(timeout=60)


def test_slow_rank_is_reported_as_straggler_and_continues(cluster3: dtkit.Cluster):
    run = small.train(cluster3, training_step=costly, loss=None, steps=MANY, start=False)
    run.inject_delay(2, 10)
    run.resume()
    report, _ = wait_for_report(cluster3, kind="straggler")
    assert report.rank == 2
    assert report.phase in ("forward", "backward", "step")  # a sample may also meet the beginning of a step
    assert "slowed 10x on purpose" in report.reason
    before = run.status.step
    wait_until(lambda: run.status.step > before)
    run.stop()


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    threading.Event().wait(0.01)
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


@pytest.mark.slow
def test_stuck_rank_is_reported_within_ten_seconds_by_default(cluster2: dtkit.Cluster, flag: Path):
    run = small.train(cluster2, training_step=make_step(loop_forever, flag, rank=0), loss=None, steps=MANY)
    wait_until(lambda: run.status.step)
    flag.touch()
    start = time.monotonic()
    report, _ = wait_for_report(cluster2, DetectorConfig())
    assert time.monotonic() - start < 10
    assert (report.rank, report.phase) == (0, "forward")
    run_report = wait_until(lambda: run.stall_report)
    assert (run_report.kind, run_report.rank) == ("stuck", 0)
    assert run.status.message.startswith("rank 0 keeps the other one waiting")
    flag.unlink()
    wait_until(lambda: run.stall_report is None, timeout=5)  # dispatches return in time again
    assert any(event.text.startswith("node 0 goes on after") for event in run.history.events)
    run.stop()


class StallingTanh(nn.Tanh):
    """Activation that does not end while the file exists; an interrupt removes the file."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            loop_forever(self.flag)
        except KeyboardInterrupt:
            self.flag.unlink(missing_ok=True)
            raise
        return super().forward(x)


@pytest.mark.slow
def test_stage_waits_for_another_no_longer_than_step_timeout(flag: Path):
    """gloo's own limit is the one given when the group was formed, 30 s above step_timeout."""
    layers = nn.Linear(4, 8), StallingTanh(flag), nn.Linear(8, 3)
    with dtkit.Cluster(2, threads=1, step_timeout=2) as cluster:
        pipeline = dtkit.Pipeline(2, 2, split=["2"])
        run = small.train(cluster, nn.Sequential(*layers), strategy=pipeline, steps=3, start=False)
        flag.touch()
        run.resume()
        run.wait(28)
        assert run.status.state is dtkit.types.State.COMPLETED
        assert not flag.exists()


@pytest.mark.slow
def test_every_call_without_a_controller_raises():
    """No call is in flight when the controller dies, so that only the next call can notice it."""
    with dtkit.Cluster(2, threads=1) as cluster:
        run = small.train(cluster, steps=50, start=False)
        run.step(2)
        controller = psutil.Process(cluster._engine_group.transport._launcher._cluster.controller.process.pid)
        for process in [*controller.children(recursive=True), controller]:
            process.kill()
        for call in (lambda: cluster.run(int), cluster.refresh_nodes, lambda: run.model, run.step):
            with (
                ends_soon(),
                pytest.raises(dtkit.errors.DtkitError, match="the controller, through which every message"),
            ):
                call()


def fail_one_sample() -> None:
    """Let one sample of rank 1's watchdog fail."""
    from dtkit.engine.session import get_session

    watchdog: Any = get_session().state.watchdog

    def fail_once(_spec: Any) -> None:
        del watchdog.sample
        raise ValueError("sampling failed")

    if dist.get_rank() == 1:
        watchdog.sample = fail_once


def test_failing_watchdog_continues_and_is_logged_in_the_run(cluster2: dtkit.Cluster):
    cluster2.run(fail_one_sample)
    run, logged = small.train(cluster2, steps=MANY), threading.Event()
    unsubscribe = run.subscribe(lambda: list_watchdog_events(run) and logged.set())
    assert logged.wait(20)
    unsubscribe()
    (event,) = list_watchdog_events(run)
    assert event.rank == 1
    assert "ValueError: sampling failed" in event.text
    wait_until(lambda: read_op(cluster2, rank=1) == "advance")  # it is idle between two calls
    run.stop()


def read_op(cluster: dtkit.Cluster, rank: int) -> str | None:
    status = cluster.stacks().ranks[rank].status
    return None if status is None else status.op


def list_watchdog_events(run: dtkit.Run) -> list[Event]:
    return [event for event in run.history.events if "watchdog" in event.text]

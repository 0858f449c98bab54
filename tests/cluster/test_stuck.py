"""Ranks that are stuck, each in its own way, on real engines: who is named, with which phase and line.

An engine writes twice a second how it stands, so a test takes some seconds here, with limits of one and a half. The
usual ones are tried once.
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
from tests.support.waiting import soon, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.health.stall_report import StallReport
    from dtkit.types import Event

pytestmark = pytest.mark.cluster

QUICK = DetectorConfig(min_limit_s=1.5)  # more than a word may be old: none is from before the dispatch
MANY = 100_000  # steps: more than a test waits for


@pytest.fixture(scope="module")
def cluster3() -> Iterator[dtkit.Cluster]:
    """Three engines: with two, who waits for whom is half the answer."""
    with dtkit.Cluster(3, threads=1) as started:
        yield started


@pytest.fixture(autouse=True)
def _no_run_goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails must not take the next ones along."""
    clusters = [request.getfixturevalue(name) for name in {"cluster2", "cluster3"} & set(request.fixturenames)]
    yield
    for cluster in clusters:
        run = cluster.current_run
        if run is not None and not run.status.state.has_ended:
            run.stop()


@pytest.fixture
def sign(tmp_path: Path) -> Iterator[Path]:
    """While this file is there, some rank does what it should not."""
    path = tmp_path / "stuck"
    yield path
    path.unlink(missing_ok=True)


def named(
    cluster: dtkit.Cluster, limits: DetectorConfig = QUICK, kind: str = "stuck"
) -> tuple[StallReport, StallDetector]:
    """What a lookout tells first of that kind, with a dispatch that began now."""
    lookout = StallDetector(stacks.StatusProbe(cluster.folder, lambda: cluster.nodes), limits)
    lookout.on_sent(time.monotonic())

    def look() -> StallReport | None:
        found = lookout.check(time.monotonic())
        return found if found is not None and found.kind == kind else None

    return until(look), lookout


def recovery(lookout: StallDetector) -> StallReport:
    found: StallReport = until(lambda: lookout.check(time.monotonic()))
    return found


def check_line(found: StallReport, function: Callable[..., Any], text: str) -> None:
    """The finding's line is one of `function`, and has `text` in it."""
    place, _, name = found.location.partition(" in ")
    file, _, line = place.rpartition(":")
    assert Path(file).name == "test_stuck.py"
    assert name == function.__name__
    lines, first = inspect.getsourcelines(function)
    assert text in lines[int(line) - first]


def stepping(misbehave: Callable[[Path], None], sign: Path, rank: int = 1) -> Callable[..., torch.Tensor]:
    """A step in which a rank misbehaves while the sign is there."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        if dist.get_rank() == rank and sign.exists():
            misbehave(sign)
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    return step


def loop_for_ever(sign: Path) -> None:
    while sign.exists():
        pass


def wait_for_a_lock(sign: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    while sign.exists():
        lock.acquire(timeout=0.2)


def hold_the_interpreter(sign: Path) -> None:
    """In C, for about eight seconds on any machine, without a call of the system that a signal would end."""
    sign.unlink()
    count, began = 10_000_000, time.perf_counter()
    collections.deque(itertools.repeat(0, count), maxlen=0)
    count = int(count * 8 / (time.perf_counter() - began))
    collections.deque(itertools.repeat(0, count), maxlen=0)


@pytest.mark.parametrize(
    ("misbehave", "text"), [(loop_for_ever, "sign.exists()"), slow(wait_for_a_lock, "lock.acquire(timeout")]
)
def test_a_step_that_does_not_end(cluster3: dtkit.Cluster, sign: Path, misbehave: Any, text: str):
    run = small.train(cluster3, training_step=stepping(misbehave, sign), loss=None, steps=MANY)
    until(lambda: run.status.step)
    sign.touch()
    found, lookout = named(cluster3)
    assert (found.rank, found.phase) == (1, "forward")
    check_line(found, misbehave, text)
    shown = cluster3.stacks()
    assert [seen.status is not None and seen.status.is_blocked for seen in shown.ranks] == [True, False, True]
    assert misbehave.__name__ in repr(shown)
    assert "waiting in a collective" in repr(shown)
    sign.unlink()
    assert recovery(lookout).reason.startswith("rank 1 goes on after")
    run.stop()
    small.check_usable(cluster3)


def test_a_rank_whose_interpreter_is_held(cluster2: dtkit.Cluster, sign: Path):
    run = small.train(cluster2, training_step=stepping(hold_the_interpreter, sign), loss=None, steps=MANY)
    until(lambda: run.status.step)
    sign.touch()
    found, _ = named(cluster2)
    assert found.rank == 1
    assert "C code holds its interpreter" in found.reason
    check_line(found, hold_the_interpreter, "collections.deque(")
    run.stop()


def test_a_stopped_rank_is_named_and_the_training_is_as_undisturbed(cluster2: dtkit.Cluster):
    straight = small.train(cluster2, steps=400)
    straight.wait(120)
    run = small.train(cluster2, steps=400)
    until(lambda: run.status.step)
    process = psutil.Process(cluster2.nodes[1].pid)
    process.suspend()
    try:
        found, lookout = named(cluster2)
        shown = repr(cluster2.stacks())
    finally:
        process.resume()
    assert (found.rank, found.kind) == (1, "stuck")
    assert f"kill -CONT {process.pid}" in found.remedy
    assert "stopped (SIGSTOP), last seen in" in shown
    assert recovery(lookout).kind == "recovered"
    run.wait(120)
    check_same(run, straight)


def check_same(run: dtkit.Run, other: dtkit.Run) -> None:
    mine, theirs = run.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_stacks_do_not_disturb_a_training(cluster2: dtkit.Cluster):
    straight = small.train(cluster2, steps=1000)
    straight.wait(120)
    run = small.train(cluster2, steps=1000, start=False)
    taken: list[stacks.Stacks] = []

    def take() -> None:
        taken.extend(cluster2.stacks() for _ in range(20))

    thread = threading.Thread(target=take)
    thread.start()
    run.resume()
    run.wait(120)
    thread.join(120)
    assert len(taken) == 20
    assert any(shown[rank] for shown in taken for rank in range(2))
    check_same(run, straight)


def wait_for_one_that_returned() -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(torch.zeros(2))


def wait_for_one_that_does_something_else(sign: Path) -> None:
    if dist.get_rank() == 0:
        sleep_long(sign)
    dist.all_reduce(torch.zeros(2), async_op=True).wait()


def sleep_long(sign: Path) -> None:
    while sign.exists():
        threading.Event().wait(0.2)


def end(cluster: dtkit.Cluster, task: Any) -> None:
    cluster.interrupt()
    with pytest.raises(dtkit.errors.EngineError):
        task.result(timeout=60)
    small.check_usable(cluster)


def test_a_rank_that_never_calls_the_collective(cluster3: dtkit.Cluster):
    task = cluster3.submit(wait_for_one_that_returned)
    found, _ = named(cluster3)
    assert (found.rank, found.phase) == (1, "idle")
    assert "has returned from the call" in found.reason
    end(cluster3, task)


def test_a_rank_that_does_something_else(cluster3: dtkit.Cluster, sign: Path):
    """Named by what torch has counted: the others wait in a line of their own."""
    sign.touch()
    task = cluster3.submit(wait_for_one_that_does_something_else, sign)
    found, _ = named(cluster3)
    assert (found.rank, found.phase) == (0, "call_function")
    check_line(found, sleep_long, "wait(0.2)")
    sign.unlink()
    task.result(timeout=60)


def test_a_slow_rank_is_a_straggler_and_goes_on(cluster3: dtkit.Cluster):
    run = small.train(cluster3, training_step=costly, loss=None, steps=MANY, start=False)
    run.inject_delay(2, 10)
    run.resume()
    found, _ = named(cluster3, kind="straggler")
    assert found.rank == 2
    assert found.phase in ("forward", "backward")
    assert "slowed 10x on purpose" in found.reason
    before = run.status.step
    until(lambda: run.status.step > before)
    run.stop()


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    threading.Event().wait(0.01)
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


@pytest.mark.slow
def test_it_is_named_within_ten_seconds_by_the_usual_limits(cluster2: dtkit.Cluster, sign: Path):
    run = small.train(cluster2, training_step=stepping(loop_for_ever, sign, rank=0), loss=None, steps=MANY)
    until(lambda: run.status.step)
    sign.touch()
    begun = time.monotonic()
    found, _ = named(cluster2, DetectorConfig())
    assert time.monotonic() - begun < 10
    assert (found.rank, found.phase) == (0, "forward")
    told = until(lambda: run.stall_report)
    assert (told.kind, told.rank) == ("stuck", 0)
    assert run.status.message.startswith("rank 0 keeps the other one waiting")
    sign.unlink()
    until(lambda: run.stall_report is None, timeout=5)  # dispatches land again, and none of them is late
    assert any(event.text.startswith("rank 0 goes on after") for event in run.history.events)
    run.stop()


class Stalling(nn.Tanh):
    """Does not end while the sign is there, which it takes away when it is interrupted."""

    def __init__(self, sign: Path) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            loop_for_ever(self.sign)
        except KeyboardInterrupt:
            self.sign.unlink(missing_ok=True)
            raise
        return super().forward(x)


def test_a_stage_waits_for_another_no_longer_than_step_timeout(sign: Path):
    """A gloo connection's own limit is that of its group's making; a run's is half a minute more than step_timeout."""
    layers = nn.Linear(4, 8), Stalling(sign), nn.Linear(8, 3)
    with dtkit.Cluster(2, threads=1, step_timeout=2) as cluster:
        pipeline = dtkit.Pipeline(2, 2, split=["2"])
        run = small.train(cluster, nn.Sequential(*layers), strategy=pipeline, steps=3, start=False)
        sign.touch()
        run.resume()
        run.wait(28)
        assert run.status.state is dtkit.types.State.COMPLETED
        assert not sign.exists()


def test_without_the_controller_every_call_says_so():
    """Nothing is under way when it dies: nobody but the next call can find out."""
    with dtkit.Cluster(2, threads=1) as cluster:
        run = small.train(cluster, steps=50, start=False)
        run.step(2)
        controller = psutil.Process(cluster._transport._cluster.controller.process.pid)
        for process in [*controller.children(recursive=True), controller]:
            process.kill()
        for call in (lambda: cluster.run(int), cluster.refresh_nodes, lambda: run.model, run.step):
            with (
                soon(),
                pytest.raises(dtkit.errors.DtkitError, match="the controller, through which every message"),
            ):
                call()


def upset() -> None:
    """Of rank 1 one look fails."""
    from dtkit.engine.session import get_session

    watchdog: Any = get_session().watchdog

    def fail_once(_spec: Any) -> None:
        del watchdog.sample
        raise ValueError("it could not be told")

    if dist.get_rank() == 1:
        watchdog.sample = fail_once


def test_a_watchdog_that_fails_goes_on_and_the_run_is_told(cluster2: dtkit.Cluster):
    cluster2.run(upset)
    run, told = small.train(cluster2, steps=MANY), threading.Event()
    unsubscribe = run.subscribe(lambda: complaints(run) and told.set())
    assert told.wait(20)
    unsubscribe()
    (said,) = complaints(run)
    assert (said.rank, said.text.partition(": ")[2]) == (1, "ValueError: it could not be told")
    seen = cluster2.stacks().ranks[1].status
    assert seen is not None
    assert seen.op == "advance"
    run.stop()


def complaints(run: dtkit.Run) -> list[Event]:
    return [event for event in run.history.events if "watchdog" in event.text]

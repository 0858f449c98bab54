"""The verdict on runs of real engines whose cause is planted."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dtkit
from dtkit._util.resources import count_cores
from dtkit.history.between_steps import read_time_between
from dtkit.history.scalars import CORE_WAIT_NAME
from tests.support.small import data, sgd, train

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster


class SlowOnRank1(Dataset):
    """Samples that take long to load on rank 1."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if torch.distributed.get_rank() == 1:
            # sleeps: a declared cost, since a loaded machine guarantees no other
            time.sleep(0.01)
        return torch.full((4,), float(index)), index % 3


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take a step of a declared cost."""
    # sleeps: as above
    time.sleep(0.02)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def take_steps(cluster: Any, model: nn.Module, rows: Any, steps: int, **options: Any) -> dtkit.Run:
    run = cluster.train(model, rows, optimizer=sgd, steps=steps + 1000, start=False, **options)
    run.step(steps)
    return run


def test_slow_loading_on_one_rank_is_named_with_its_node(cluster2):
    model = nn.Linear(4, 3)
    run = take_steps(cluster2, model, SlowOnRank1(), 12, training_step=costly, batch_size=16)
    verdict = run.verdict
    assert verdict.cause == "data", verdict.text
    assert verdict.text.startswith("waiting for data on node 1: num_workers="), verdict.text
    assert verdict.text in repr(run)
    run.stop()


def test_a_delayed_rank_is_the_straggler(cluster2):
    run = train(cluster2, loss=None, training_step=costly, steps=40, start=False)
    run.inject_delay(1, 3)
    run.step(30)
    assert run.verdict.cause == "straggler", run.verdict.text
    assert "node 1" in run.verdict.text
    run.stop()


def test_large_gradients_of_a_small_computation_are_communication(cluster2):
    model = nn.Sequential(nn.EmbeddingBag(400_000, 16), nn.Linear(16, 2))
    rows = torch.randint(0, 400_000, (256, 2)), torch.randint(0, 2, (256,))
    run = take_steps(
        cluster2,
        model,
        rows,
        12,
        loss=nn.CrossEntropyLoss(),
        batch_size=16,
        strategy=dtkit.DataParallel(bucket_cap_mb=25),
    )  # by DDP, which sends them
    found = {verdict.cause: verdict for verdict in (run.verdict, *run.verdict.others)}
    assert "communication" in found, found  # that one process is faster may go first, and a busy machine
    assert re.match(r"communication is \d+ % of a step: .*batch_size=", found["communication"].text), found
    run.stop()


@contextlib.contextmanager
def busy_cores(each: int = 1) -> Iterator[None]:
    """Keep each core of this host busy with this many processes."""
    loop = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    hogs = [subprocess.Popen(loop, stdout=subprocess.PIPE) for _ in range(each * count_cores())]
    try:
        for hog in hogs:
            assert hog.stdout is not None
            hog.stdout.readline()
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait(10)
            assert hog.stdout is not None
            hog.stdout.close()


def test_processes_that_take_the_cores_are_the_cause(cluster2: dtkit.Cluster):
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 3))
    rows = torch.randn(2048, 512), torch.randint(0, 3, (2048,))
    with busy_cores(each=2):
        run = take_steps(cluster2, model, rows, 30, loss=nn.CrossEntropyLoss(), batch_size=2048)
        start_s = time.monotonic()
        while time.monotonic() < start_s + 45 and "another Python program" not in run.verdict.text:
            run.step(2)  # the first counts may be of what other tests did before
        verification = run.verify(8)
    verdict = run.verdict
    assert verdict.cause == "cores", (verdict.text, verdict.arithmetic)
    # Other tests may have other programs beside these.
    assert re.search(r"of their time: .*another Python program.* used it;", verdict.text), verdict.text
    assert any(re.search(r" used meanwhile: .*another Python program ", line) for line in verdict.arithmetic)
    text = verification.text()
    assert re.search(r"not comparable, because other programs used .* meanwhile: .*another Python program", text), text
    run.stop()


def test_steps_that_sleep_on_a_busy_machine_wait_for_no_core(cluster2: dtkit.Cluster):
    with busy_cores():
        run = train(cluster2, loss=None, training_step=sleepy, steps=20, start=False)
        run.step(12)
    assert CORE_WAIT_NAME in run.history.system_names
    assert run.verdict.cause != "cores", (run.verdict.text, run.verdict.arithmetic)
    run.stop()


def sleepy(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take a step that sleeps for nearly all of its time."""
    # sleeps: a declared cost, next to which what a loaded machine adds is small
    time.sleep(0.5)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def slow_metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a number, at a declared cost."""
    # sleeps: as above
    time.sleep(0.2)
    return (output.argmax(1) == target).float().mean()


def wait_half_a_second(_run: dtkit.Run) -> None:
    """Keep the run waiting."""
    # sleeps: as above
    time.sleep(0.5)


def test_slow_validation_is_named_with_the_interval_that_makes_it_short(cluster2: dtkit.Cluster):
    run = train(cluster2, epochs=10, validation=data(), metrics={"slow": slow_metric}, batch_size=8)
    run.wait(60)
    verdict = run.verdict
    assert verdict.cause == "validation", (verdict.text, verdict.arithmetic)
    assert re.match(r"validation takes \d\d % of the time: validation_every=10 would", verdict.text), verdict.text
    between = read_time_between(run.history)
    assert 9 * 0.2 < between.seconds["validation"] <= between.total_s
    assert between.whole_s < run.status.elapsed_s


def test_a_slow_callback_is_the_cause_and_a_pause_is_not(cluster2: dtkit.Cluster):
    run = train(cluster2, epochs=6, batch_size=8, callbacks=[wait_half_a_second])
    run.wait(60)
    assert run.verdict.cause == "callbacks", (run.verdict.text, run.verdict.arithmetic)
    assert read_time_between(run.history).seconds["callbacks"] > 5 * 0.5
    paused = train(cluster2, steps=60, start=False)
    for _ in range(6):
        paused.step(5)
        # sleeps: the time for which the run is paused
        time.sleep(0.3)
    assert read_time_between(paused.history).total_s < 1.0
    paused.stop()

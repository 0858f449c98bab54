"""A real Jupyter kernel: after a restart the next kernel continues the run; an interrupt pauses it."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from dtkit._util import timeouts
from dtkit._util.deadline import wait_until
from dtkit.cluster import cluster_file
from tests.faults.expect import get_load_factor
from tests.support.kernel import Kernel
from tests.support.marks import slow
from tests.support.oracle import BATCH, BOUND, SEED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

STEPS = 1000
TRAIN = f"""
import pathlib, threading
import dtkit
from tests.support import oracle

class Net(oracle.torch.nn.Module):  # defined in a cell: pickled by value
    def __init__(self):
        super().__init__()
        self.inner = oracle.mlp()
        self.slow = pathlib.Path("MARK")

    def forward(self, x):
        if self.slow.exists():
            threading.Event().wait(0.02)
        return self.inner(x)

cluster = dtkit.Cluster(2, threads=1)
options = dict(loss=oracle.mean_loss, optimizer=oracle.momentum, batch_size={BATCH}, steps={STEPS}, seed={SEED})
run = cluster.train(Net(), oracle.data(), shuffle="global", **options)
started = threading.Event()
run.subscribe(lambda: run.status.step > 50 and started.set())
assert started.wait(60)
print("trains", flush=True)
"""
ATTACH = f"""
import dtkit
from tests.support import oracle

cluster = dtkit.attach()
run = cluster.current_run
step = run.status.step
assert run.status.state is dtkit.types.State.PAUSED, run.status
assert 50 < step < {STEPS}, step
assert list(run.history.totals()["step"]) == list(range(step))
"""
CONTINUE = f"""
run.resume()
run.wait(120)
assert list(run.history.totals()["step"]) == list(range({STEPS}))
state = {{name.removeprefix("inner."): value for name, value in run.model.state_dict().items()}}
options = dict(loss=oracle.mean_loss, optimizer=oracle.momentum, batch_size={BATCH}, steps={STEPS}, seed={SEED})
undisturbed = cluster.train(oracle.mlp(), oracle.data(), shuffle="global", **options)
undisturbed.wait(120)
print(oracle.max_difference(state, undisturbed.model.state_dict()))
cluster.close()
"""


@pytest.fixture
def kernel(tmp_path: Path, root: Path) -> Iterator[Kernel]:
    """Kernel whose clusters belong to this test alone and end with it."""
    with Kernel.started(tmp_path, root) as started:
        yield started
    for cluster_info in cluster_file.find_running(tmp_path):  # left by a failed test
        psutil.Process(cluster_info.reaper.pid).terminate()


@pytest.mark.parametrize("cell", [slow(""), "run.wait()"], ids=["idle", "waiting"])
@pytest.mark.parametrize("now", [slow(False), True], ids=["asked to end", "killed"])
@pytest.mark.slow
def test_restarted_kernel_continues_the_run(kernel: Kernel, tmp_path: Path, *, now: bool, cell: str):
    slow_flag = tmp_path / "slow"
    slow_flag.touch()
    kernel.finish(kernel.begin(TRAIN.replace("MARK", str(slow_flag)) + cell), until="trains")
    kernel.restart(now=now)
    kernel.run(ATTACH)
    slow_flag.unlink()
    assert float(kernel.run(CONTINUE)) <= BOUND


# -- shutdown ----------------------------------------------------------------------------------------------------

TRAIN_SHORTLY = """
import torch, dtkit
cluster = dtkit.Cluster(2, threads=1)
data = torch.randn(64, 4), torch.randint(3, (64,))
options = dict(loss=torch.nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, batch_size=16, steps=20)
run = cluster.train(torch.nn.Linear(4, 3), data, start=False, **options)
run.step(5)
"""
WAIT_UNTIL_PAUSED = """
from dtkit.errors import NonFiniteError
try:
    run.wait(60)
except NonFiniteError as error:
    assert (error.remedy == "data") == IS_BAD_ROW
assert run.status.state.value == "paused"
"""
DIVERGE = f"""
run = cluster.train(torch.nn.Linear(4, 1), (data[0], 100 * data[0][:, :1]), **options | dict(
    loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=100.0), steps=1000))
IS_BAD_ROW = False
{WAIT_UNTIL_PAUSED}"""
BREAK_DATA = f"""
data[0][40, 1] = float("nan")
run = cluster.train(torch.nn.Linear(4, 3), lambda: data, **options)
IS_BAD_ROW = True
{WAIT_UNTIL_PAUSED}"""


@pytest.mark.parametrize(
    ("cell", "num_left"),
    [("run.resume(); run.wait(60)", 0), ("", 1), (DIVERGE, 0), (BREAK_DATA, 1)],
    ids=["completed run", "paused run", "diverged run", "run paused on a bad row"],
)
def test_shutdown_ends_engines_unless_a_run_is_unfinished(kernel: Kernel, tmp_path: Path, cell: str, num_left: int):
    kernel.run(TRAIN_SHORTLY + cell)
    (info,) = cluster_file.find_running(tmp_path)
    kernel.shut_down()
    if not num_left:
        assert wait_until(lambda: not info.is_alive, timeouts.REAPER_EXIT_TIMEOUT_S)
    assert len(cluster_file.find_running(tmp_path)) == num_left


def test_restart_keeps_the_engines_of_a_completed_run(kernel: Kernel):
    kernel.run(TRAIN_SHORTLY + "run.resume(); run.wait(60)")
    kernel.restart(now=False)
    kernel.run("import dtkit; cluster = dtkit.attach(); assert cluster.current_run.status.step == 20; cluster.close()")


# -- interrupts --------------------------------------------------------------------------------------------------

SLOW_TRAIN = """
import json, threading, time
import torch, dtkit

def slow_loss(output, target):
    threading.Event().wait({step_s})
    return torch.nn.functional.cross_entropy(output, target)

cluster = dtkit.Cluster(2, threads=1)
data = torch.randn(64, 4), torch.randint(3, (64,))
options = dict(loss=slow_loss, optimizer=torch.optim.SGD, batch_size=16, steps=1_000_000)
run = cluster.train(torch.nn.Linear(4, 3), data, **options)
"""
WAIT = """
reached, step = threading.Event(), run.status.step + {steps}
unsubscribe = run.subscribe(lambda: run.status.step >= step and reached.set())
assert reached.wait(60)
unsubscribe()
printed = threading.Event()

def print_once():
    if run.status.message and not printed.is_set():  # shown while the cell waits
        printed.set()
        print("waits", flush=True)

unsubscribe = run.subscribe(print_once)
try:
    run.wait(60)
except KeyboardInterrupt:
    ended = time.time()
unsubscribe()
totals = run.history.totals()
assert list(totals["step"]) == list(range(run.status.step))
print(json.dumps([ended, run.status.state.value, sum(totals["step_s"][-2:])]))
run.resume()
"""
INTERRUPT_DELAYS_S = 0.0, 0.3, 0.5, 0.8, 1.1  # in different steps of a dispatch of one second
RETURN_S = 0.5


@pytest.mark.parametrize(("step_s", "steps"), [(0.3, 6), slow(0.005, 300)], ids=["slow steps", "fast steps"])
@pytest.mark.slow
def test_interrupted_wait_returns_within_two_steps(kernel: Kernel, step_s: float, steps: int):
    """The limit is two steps and half a second. After `steps` steps, dispatches have their full length."""
    kernel.run(SLOW_TRAIN.format(step_s=step_s))
    for pause in INTERRUPT_DELAYS_S:
        cell = kernel.begin(WAIT.format(steps=steps))
        kernel.finish(cell, until="waits")
        threading.Event().wait(pause)
        interrupted_at = kernel.interrupt()
        ended, state, two_steps = json.loads(kernel.finish(cell))
        print(f"wait returned after {ended - interrupted_at:.2f} s; two steps take {two_steps:.3f} s")
        assert state == "paused"
        assert ended - interrupted_at <= two_steps + RETURN_S * get_load_factor()
    kernel.run("cluster.close()")

"""A real Jupyter kernel: it restarts in the midst of a run, and the next one goes on; it is interrupted and pauses."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from dtkit.cluster import cluster_file
from tests.faults.expect import crowd
from tests.support.kernel import Kernel
from tests.support.marks import slow
from tests.support.oracle import BATCH, BOUND, SEED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

STEPS = 1000
TRAINS = f"""
import pathlib, threading
import dtkit
from tests.support import oracle

class Net(oracle.torch.nn.Module):  # of a cell: it travels by value
    def __init__(self):
        super().__init__()
        self.inner = oracle.mlp()
        self.slow = pathlib.Path("MARK")

    def forward(self, x):
        if self.slow.exists():
            threading.Event().wait(0.02)
        return self.inner(x)

cluster = dtkit.Cluster(2, threads=1)
how = dict(loss=oracle.mean_loss, optimizer=oracle.momentum, batch_size={BATCH}, steps={STEPS}, seed={SEED})
run = cluster.train(Net(), oracle.data(), shuffle="global", **how)
there = threading.Event()
run.subscribe(lambda: run.status.step > 50 and there.set())
assert there.wait(60)
print("trains", flush=True)
"""
ATTACHES = f"""
import dtkit
from tests.support import oracle

cluster = dtkit.attach()
run = cluster.current_run
stands = run.status.step
assert run.status.state is dtkit.types.State.PAUSED, run.status
assert 50 < stands < {STEPS}, stands
assert list(run.history.totals()["step"]) == list(range(stands))
"""
GOES_ON = f"""
run.resume()
run.wait(120)
assert list(run.history.totals()["step"]) == list(range({STEPS}))
found = {{name.removeprefix("inner."): value for name, value in run.model.state_dict().items()}}
how = dict(loss=oracle.mean_loss, optimizer=oracle.momentum, batch_size={BATCH}, steps={STEPS}, seed={SEED})
undisturbed = cluster.train(oracle.mlp(), oracle.data(), shuffle="global", **how)
undisturbed.wait(120)
print(oracle.difference(found, undisturbed.model.state_dict()))
cluster.close()
"""


@pytest.fixture
def kernel(tmp_path: Path, root: Path) -> Iterator[Kernel]:
    """With clusters of this test alone, which end with it."""
    with Kernel.started(tmp_path, root) as started:
        yield started
    for left in cluster_file.find_running(tmp_path):  # of a test that failed: a kernel leaves them to the lease
        psutil.Process(left.warden[0]).terminate()


@pytest.mark.parametrize("cell", [slow(""), "run.wait()"], ids=["idle", "waiting"])
@pytest.mark.parametrize("now", [slow(False), True], ids=["asked to end", "killed"])
def test_a_kernel_that_restarts_goes_on_with_the_run(kernel: Kernel, tmp_path: Path, *, now: bool, cell: str):
    slow = tmp_path / "slow"
    slow.touch()
    kernel.finish(kernel.begin(TRAINS.replace("MARK", str(slow)) + cell), until="trains")
    kernel.restart(now=now)
    kernel.run(ATTACHES)
    slow.unlink()
    assert float(kernel.run(GOES_ON)) <= BOUND


# -- interrupts --------------------------------------------------------------------------------------------------

PACED = """
import json, threading, time
import torch, dtkit

def paced(output, target):
    threading.Event().wait({step_s})
    return torch.nn.functional.cross_entropy(output, target)

cluster = dtkit.Cluster(2, threads=1)
data = torch.randn(64, 4), torch.randint(3, (64,))
run = cluster.train(torch.nn.Linear(4, 3), data, loss=paced, optimizer=torch.optim.SGD, batch_size=16, steps=1_000_000)
"""
WAITS = """
there, enough = threading.Event(), run.status.step + {steps}
unsubscribe = run.subscribe(lambda: run.status.step >= enough and there.set())
assert there.wait(60)
unsubscribe()
told = threading.Event()

def tell():
    if run.status.message and not told.is_set():  # that buttons act later: the cell waits
        told.set()
        print("waits", flush=True)

unsubscribe = run.subscribe(tell)
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
PRESSED_AFTER_S = 0.0, 0.3, 0.5, 0.8, 1.1  # in different steps of a dispatch, which lasts a second
RETURN_S = 0.5


@pytest.mark.parametrize(("step_s", "steps"), [(0.3, 6), slow(0.005, 300)], ids=["slow steps", "fast steps"])
@pytest.mark.slow
def test_an_interrupt_of_wait_returns_within_two_steps(kernel: Kernel, step_s: float, steps: int):
    """And half a second; `steps` are those after which dispatches are as long as they get."""
    kernel.run(PACED.format(step_s=step_s))
    for pause in PRESSED_AFTER_S:
        cell = kernel.begin(WAITS.format(steps=steps))
        kernel.finish(cell, until="waits")
        threading.Event().wait(pause)
        pressed = kernel.interrupt()
        ended, state, two_steps = json.loads(kernel.finish(cell))
        print(f"pressed after {pause} s: wait returned after {ended - pressed:.2f} s, two steps are {two_steps:.3f} s")
        assert state == "paused"
        assert ended - pressed <= two_steps + RETURN_S * crowd()
    kernel.run("cluster.close()")

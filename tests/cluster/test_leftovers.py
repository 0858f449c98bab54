"""What a cluster leaves behind: nothing. (What it opens to others: test_security.py.)

Processes are known by pid and start time. Each test starts clusters of its own, since it ends them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import dtkit
from dtkit.engine.comm import tcp as sockets
from tests.support.leftovers import (
    Process,
    assert_nothing_left,
    belongs,
    family,
    files,
    get_stuck,
    large,
    until_empty,
    until_stepping,
)
from tests.support.marks import slow
from tests.support.small import LONG, data, sgd, train

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster


# -- what is left --------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_cluster_that_is_closed_while_a_run_is_running(runtime: Path):
    with dtkit.Cluster(2) as cluster:
        processes = family(cluster, runtime)
        run = train(cluster, rows=large(), steps=LONG)
        until_stepping(run)
        me = os.getpid(), psutil.Process().create_time()
        assert not files(processes | {me})  # the data lost its name once every engine had mapped it
        begun = time.monotonic()
    assert time.monotonic() - begun < 20
    assert_nothing_left(processes, runtime)
    assert run.status.state is dtkit.types.State.STOPPED


@pytest.mark.slow
def test_nothing_is_left_after_an_exception(runtime: Path):
    def fail() -> None:
        with dtkit.Cluster(2) as cluster:
            part = cluster.partition(large())
            train(cluster, rows=part).wait(60)
            found.extend(family(cluster, runtime))
            raise RuntimeError("in the cell")

    found: list[Process] = []
    with pytest.raises(RuntimeError, match="in the cell"):
        fail()
    assert_nothing_left(set(found), runtime)


def test_close_ends_engines_that_are_stuck(runtime: Path, tmp_path: Path):
    cluster = dtkit.Cluster(2)
    try:
        processes = family(cluster, runtime)
        get_stuck(cluster, tmp_path)
    finally:
        cluster.close()
    assert_nothing_left(processes, runtime)


def test_a_start_that_fails_leaves_nothing(runtime: Path):
    with pytest.raises(dtkit.errors.ClusterError, match=r"within 0.01 s; give (it|them) longer with timeout="):
        dtkit.Cluster(2, timeout=0.01)
    assert not until_empty(runtime, 10)
    left = [p for p in psutil.process_iter() if any(str(runtime) in part for part in _mentions(p))]
    assert not left


def _mentions(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [*process.cmdline(), process.environ().get("IPP_PROFILE_DIR", "")]
    return []


NOTEBOOK = """
import dtkit, pathlib, sys
from dtkit.cluster import transport
from tests.support import leftovers, small

def ready(*_):
    print("ready", flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    {before}
    cluster = dtkit.Cluster(2, lease=2)
    {after}
    ready()
"""
CASES = {
    "with a run": (
        "pass",
        "leftovers.until_stepping(small.train(cluster, rows=leftovers.large(), steps=10**6))",
    ),
    "with engines that are stuck": ("pass", "leftovers.get_stuck(cluster, pathlib.Path(sys.argv[1]))"),
    "while it starts": ("transport.LaunchedTransport._report_members = print; transport._wait_until = ready", "pass"),
}


@contextlib.contextmanager
def notebook(case: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a cluster, says when it is ready, and waits to be killed."""
    before, after = CASES[case]
    process = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK.format(before=before, after=after), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("case", ["with a run", slow("with engines that are stuck"), slow("while it starts")])
def test_nothing_is_left_after_the_notebook_was_killed(runtime: Path, tmp_path: Path, case: str):
    with notebook(case, tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:  # ends with the process, whatever happens to it
            if line == "ready\n":
                break
        (folder,) = runtime.iterdir()
        processes = {(p.pid, p.create_time()) for p in psutil.process_iter() if belongs(p, folder)}
        assert len(processes) >= 4  # at least the warden, the controller and the engines
        processes.add((process.pid, psutil.Process(process.pid).create_time()))
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert_nothing_left(processes, runtime, timeout=20)


def test_a_run_that_was_replaced_leaves_no_replica_on_the_engines(cluster2: dtkit.Cluster):
    """DDP's reducer holds its hook in C++: one that held the replica would keep it for ever."""
    for _ in range(3):
        train(cluster2, steps=2).wait(60)
    assert max(cluster2.run(replicas_alive)) <= 1


def test_a_training_that_could_not_be_set_up_leaves_no_replica_either(cluster2: dtkit.Cluster):
    with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
        train(cluster2, lr_scheduler=refuse)
    with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
        train(cluster2, lr_scheduler=refuse, strategy=dtkit.Pipeline(2, 2))
    assert cluster2.current_run is None
    assert cluster2.run(replicas_alive) == [0, 0]


def refuse(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    raise LookupError("on purpose")


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), dtkit.Pipeline(2, 2)], ids=["data", "pipeline"])
def test_a_released_run_leaves_no_tensor_on_the_engines(cluster2: dtkit.Cluster, strategy: dtkit.Strategy):
    """Nor does its model as it was sent, though the notebook may hold the run for ever."""
    before = cluster2.run(large_tensors)
    first = train(cluster2, wide(), strategy=strategy, steps=2)
    first.wait(60)
    second = train(cluster2, wide(), strategy=strategy, steps=2)
    second.wait(60)
    assert (first.is_released, second.is_released) == (True, False)
    assert max(cluster2.run(large_tensors)) > max(before)  # of the second
    second.release()
    assert cluster2.run(large_tensors) == before


def test_a_plan_leaves_no_tensor_on_the_engines(cluster2: dtkit.Cluster):
    """torch holds the hooks of a rehearsal where Python's collector of cycles does not look."""
    before = cluster2.run(large_tensors)
    inputs, targets = data()
    sample = inputs[:4], targets[:4]
    cluster2.plan(wide(), batch_size=16, optimizer=sgd, loss=torch.nn.CrossEntropyLoss(), sample=sample)
    gc.collect()
    cluster2.call_all("node_info")  # what nobody holds is let go of with the next call
    assert cluster2.run(large_tensors) == before


STRATEGIES = {
    "data": dtkit.DataParallel(),
    "compressed": dtkit.DataParallel(compress="powersgd"),
    "averaging": dtkit.ParameterAveraging(every=2),
    "pipeline": dtkit.Pipeline(2, 2),
    "tensor": dtkit.TensorParallel(tp_size=2),
    "sharded": dtkit.Sharded(),
    "hybrid": dtkit.Sharded(replicas=2),  # with groups along the axes of its mesh
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_group_that_was_left_leaves_no_thread_and_no_connection(cluster2: dtkit.Cluster, strategy: dtkit.Strategy):
    """Nor an object: a training that goes on in the next one must not hold it, and torch's caches must not either."""
    fresh = cluster2.run(of_gloo)
    assert all(threads and sockets for threads, sockets in fresh)
    run = train(cluster2, strategy=strategy, steps=LONG)
    run.pause()
    during = cluster2.run(of_gloo)
    for _ in range(3):
        cluster2.form_process_group()
        assert max(cluster2.run(of_gloo)) <= max(during)  # groups along axes may be formed with the next step
        run.step()
        assert cluster2.run(of_gloo) == during
    run.stop()
    run.release()
    cluster2.form_process_group()
    assert cluster2.run(of_gloo) == fresh


def of_gloo() -> tuple[int, int]:
    """(gloo's threads, this process's TCP sockets)."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names), len(sockets.list_sockets())


@pytest.mark.parametrize("strategy", [dtkit.TensorParallel(tp_size=2), dtkit.Sharded()], ids=["tensor", "sharded"])
def test_meshes_of_groups_that_were_left_are_forgotten(cluster2: dtkit.Cluster, strategy: dtkit.Strategy):
    run = train(cluster2, strategy=strategy, steps=LONG)
    run.pause()
    found = []
    for _ in range(4):
        cluster2.form_process_group()
        run.step()
        found.append(cluster2.run(meshes))
    assert found[1:] == found[:1] * 3
    run.stop()


def meshes() -> int:
    gc.collect()
    return sum(isinstance(thing, DeviceMesh) for thing in gc.get_objects())


def test_a_group_that_was_broken_leaves_nothing_either(cluster2: dtkit.Cluster):
    """torch's differentiable collectives have the group for a default that there was as they were loaded."""
    cluster2.form_process_group()
    fresh = cluster2.run(of_gloo)
    cluster2.run(load_differentiable)
    for _ in range(3):
        with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
            cluster2.run(fail_on_one)
        assert cluster2.run(differentiable_sum) == [2.0, 2.0]
        assert cluster2.run(of_gloo) == fresh


def load_differentiable() -> None:
    from torch.distributed.nn import functional

    importlib.reload(functional)


def fail_on_one() -> None:
    if dist.get_rank() == 0:
        raise LookupError("on purpose")
    dist.barrier()


def differentiable_sum() -> float:
    from torch.distributed.nn import functional

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # other collectives are to take their place
        return float(functional.all_reduce(torch.ones(1)))


def test_forming_a_group_leaves_the_hook_for_exceptions_alone(cluster2: dtkit.Cluster):
    before = cluster2.run(excepthook)
    cluster2.form_process_group()
    assert cluster2.run(excepthook) == before


def excepthook() -> int:
    return id(sys.excepthook)


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 50_000), torch.nn.ReLU(), torch.nn.Linear(50_000, 3))


def large_tensors() -> int:
    gc.collect()
    return sum(type(t) in (torch.Tensor, torch.nn.Parameter) and t.numel() > 100_000 for t in gc.get_objects())


def replicas_alive() -> int:
    from torch.nn.parallel import DistributedDataParallel

    gc.collect()
    return sum(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects())

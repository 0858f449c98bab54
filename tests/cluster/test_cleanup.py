"""Clusters, runs and groups leave nothing behind when they end.

Processes are identified by pid and start time. Tests that end a cluster start their own.
"""

from __future__ import annotations

import ast
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
from dtkit.rpc.protocol import GroupOperations, make_call
from tests.support.leftovers import (
    Process,
    assert_nothing_left,
    belongs_to_cluster,
    block_engines,
    list_processes,
    list_shared_files,
    make_large_data,
    wait_until_empty,
    wait_until_stepping,
)
from tests.support.marks import slow
from tests.support.small import LONG, data, sgd, train

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster


# -- processes and files --------------------------------------------------------------------------------------------


def test_closing_a_training_cluster_leaves_nothing(runtime: Path):
    with dtkit.Cluster(2) as cluster:
        processes = list_processes(cluster, runtime)
        run = train(cluster, rows=make_large_data(), steps=LONG)
        wait_until_stepping(run)
        this_process = os.getpid(), psutil.Process().create_time()
        assert not list_shared_files(
            processes | {this_process}
        )  # files are unlinked after all engines have mapped them
        start = time.monotonic()
    assert time.monotonic() - start < 20
    assert_nothing_left(processes, runtime)
    assert run.status.state is dtkit.types.State.STOPPED


def test_a_script_that_was_interrupted_while_it_closed_a_cluster_ends_it_at_exit(runtime: Path, tmp_path: Path):
    """Ctrl+C twice: the second one comes while the cluster waits for its run to stop."""
    processes_file = tmp_path / "processes"
    script = tmp_path / "script.py"
    script.write_text(f"""
import pathlib
import dtkit
from tests.support.leftovers import list_processes
from tests.support.small import LONG, train

def interrupt():
    raise KeyboardInterrupt

cluster = dtkit.Cluster(1)
run = train(cluster, steps=LONG)
run.lifecycle.close = interrupt
found = list_processes(cluster, pathlib.Path({str(runtime)!r}))
pathlib.Path({str(processes_file)!r}).write_text(repr(found))
cluster.close()
""")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert "KeyboardInterrupt" in result.stderr
    assert_nothing_left(ast.literal_eval(processes_file.read_text()), runtime)


@pytest.mark.slow
def test_exception_in_the_with_block_leaves_nothing(runtime: Path):
    def fail() -> None:
        with dtkit.Cluster(2) as cluster:
            part = cluster.partition(make_large_data())
            train(cluster, rows=part).wait(60)
            processes.extend(list_processes(cluster, runtime))
            raise RuntimeError("in the cell")

    processes: list[Process] = []
    with pytest.raises(RuntimeError, match="in the cell"):
        fail()
    assert_nothing_left(set(processes), runtime)


@pytest.mark.slow
def test_close_ends_stuck_engines(runtime: Path, tmp_path: Path):
    cluster = dtkit.Cluster(2)
    try:
        processes = list_processes(cluster, runtime)
        block_engines(cluster, tmp_path)
    finally:
        cluster.close()
    assert_nothing_left(processes, runtime)


def test_failed_start_leaves_nothing(runtime: Path):
    with pytest.raises(dtkit.errors.ClusterError, match=r"within 0.01 s; give (it|them) longer with timeout="):
        dtkit.Cluster(2, timeout=0.01)
    assert not wait_until_empty(runtime, 10)
    alive = [p for p in psutil.process_iter() if any(str(runtime) in part for part in _list_arguments(p))]
    assert not alive


def _list_arguments(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [*process.cmdline(), process.environ().get("IPP_PROFILE_DIR", "")]
    return []


NOTEBOOK = """
import dtkit, pathlib, sys
from dtkit.cluster import launched_transport
from tests.support import leftovers, small

def ready(*_):
    print("ready", flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    {before}
    cluster = dtkit.Cluster(2, lease={lease})
    {after}
    ready()
"""
CASES = {
    "with a run": (
        "pass",
        "leftovers.wait_until_stepping(small.train(cluster, rows=leftovers.make_large_data(), steps=10**6))",
    ),
    "with stuck engines": ("pass", "leftovers.block_engines(cluster, pathlib.Path(sys.argv[1]))"),
    "while it starts": (
        "launched_transport.LaunchedTransport._report_members = print; launched_transport.wait_until = ready",
        "pass",
    ),
}


@contextlib.contextmanager
def notebook(case: str, folder: Path, lease: float = 2) -> Iterator[subprocess.Popen[str]]:
    """Process that starts a cluster, prints "ready" and waits to be killed."""
    before, after = CASES[case]
    process = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK.format(before=before, after=after, lease=lease), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_sigterm_ends_a_script_and_its_engines(runtime: Path, tmp_path: Path):
    """As a scheduler sends it. The lease would keep the engines for an hour."""
    with notebook("with a run", tmp_path, lease=3600) as process:
        assert process.stdout is not None
        assert any(line == "ready\n" for line in process.stdout)
        (folder,) = runtime.iterdir()
        processes = {(p.pid, p.create_time()) for p in psutil.process_iter() if belongs_to_cluster(p, folder)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert_nothing_left(processes, runtime, timeout=20)


@pytest.mark.parametrize("case", ["with a run", slow("with stuck engines"), slow("while it starts")])
def test_killed_notebook_leaves_nothing(runtime: Path, tmp_path: Path, case: str):
    with notebook(case, tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:  # ends with the process
            if line == "ready\n":
                break
        (folder,) = runtime.iterdir()
        processes = {(p.pid, p.create_time()) for p in psutil.process_iter() if belongs_to_cluster(p, folder)}
        assert len(processes) >= 4  # at least the reaper, the controller and the engines
        processes.add((process.pid, psutil.Process(process.pid).create_time()))
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert_nothing_left(processes, runtime, timeout=20)


def test_replaced_run_leaves_no_replica_on_the_engines(cluster2: dtkit.Cluster):
    """DDP's reducer keeps its hook in C++, so a hook with a reference to the replica would leak it."""
    for _ in range(3):
        train(cluster2, steps=2).wait(60)
    assert max(cluster2.run(count_replicas)) <= 1


def test_failed_setup_leaves_no_replica_on_the_engines(cluster2: dtkit.Cluster):
    with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
        train(cluster2, lr_scheduler=raise_error)
    with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
        train(cluster2, lr_scheduler=raise_error, strategy=dtkit.Pipeline(2, 2))
    assert cluster2.current_run is None
    assert cluster2.run(count_replicas) == [0, 0]


def raise_error(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    raise LookupError("on purpose")


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), dtkit.Pipeline(2, 2)], ids=["data", "pipeline"])
def test_released_run_leaves_no_tensor_on_the_engines(cluster2: dtkit.Cluster, strategy: dtkit.Strategy):
    """The engines also free the model that was sent, even if the notebook keeps the run."""
    before = cluster2.run(count_large_tensors)
    first = train(cluster2, wide(), strategy=strategy, steps=2)
    first.wait(60)
    second = train(cluster2, wide(), strategy=strategy, steps=2)
    second.wait(60)
    assert (first.is_released, second.is_released) == (True, False)
    assert max(cluster2.run(count_large_tensors)) > max(before)  # those of the second run
    first.release()
    second.release()
    assert cluster2.run(count_large_tensors) == before


@pytest.mark.slow
def test_plan_leaves_no_tensor_on_the_engines(cluster2: dtkit.Cluster):
    """torch keeps hooks where Python's garbage collector can't find them."""
    before = cluster2.run(count_large_tensors)
    inputs, targets = data()
    rows = inputs[:4], targets[:4]
    cluster2.plan(wide(), rows, batch_size=16, optimizer=sgd, loss=torch.nn.CrossEntropyLoss())
    gc.collect()
    cluster2._engine_group.call_all(
        make_call(GroupOperations.node_info)
    )  # engines free unused objects in the next call
    assert cluster2.run(count_large_tensors) == before


STRATEGIES = {
    "data": dtkit.DataParallel(),
    "compressed": dtkit.DataParallel(compress="powersgd"),
    "averaging": dtkit.ParameterAveraging(every=2),
    "pipeline": dtkit.Pipeline(2, 2),
    "tensor": dtkit.TensorParallel(tp_size=2),
    "sharded": dtkit.Sharded(),
    "hybrid": dtkit.Sharded(replicas=2),  # with a group per axis of its mesh
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_replaced_group_leaves_no_thread_and_no_connection(cluster2: dtkit.Cluster, strategy: dtkit.Strategy):
    """Neither a running training nor torch's caches may keep the old group."""
    initial = cluster2.run(count_gloo_resources)
    assert all(threads and sockets for threads, sockets in initial)
    run = train(cluster2, strategy=strategy, steps=LONG)
    run.pause()
    during = cluster2.run(count_gloo_resources)
    for _ in range(3):
        cluster2._engine_group.membership.form_process_group()
        assert max(cluster2.run(count_gloo_resources)) <= max(during)  # the next step may form the groups of axes
        run.step()
        assert cluster2.run(count_gloo_resources) == during
    run.stop()
    run.release()
    cluster2._engine_group.membership.form_process_group()
    assert cluster2.run(count_gloo_resources) == initial


def count_gloo_resources() -> tuple[int, int]:
    """Return the numbers of gloo's threads and of this process's TCP sockets."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names), len(sockets.list_sockets())


@pytest.mark.parametrize(
    "strategy", [dtkit.TensorParallel(tp_size=2), slow(dtkit.Sharded())], ids=["tensor", "sharded"]
)
def test_meshes_of_replaced_groups_are_freed(cluster2: dtkit.Cluster, strategy: dtkit.Strategy):
    run = train(cluster2, strategy=strategy, steps=LONG)
    run.pause()
    counts = []
    for _ in range(4):
        cluster2._engine_group.membership.form_process_group()
        run.step()
        counts.append(cluster2.run(count_meshes))
    assert counts[1:] == counts[:1] * 3
    run.stop()


def count_meshes() -> int:
    gc.collect()
    return sum(isinstance(item, DeviceMesh) for item in gc.get_objects())


def test_broken_group_leaves_no_thread_and_no_connection(cluster2: dtkit.Cluster):
    """torch's differentiable collectives keep the group that existed when they were imported as their default."""
    cluster2._engine_group.membership.form_process_group()
    initial = cluster2.run(count_gloo_resources)
    cluster2.run(load_differentiable)
    for _ in range(3):
        with pytest.raises(dtkit.errors.EngineError, match="on purpose"):
            cluster2.run(fail_on_one)
        assert cluster2.run(differentiable_sum) == [2.0, 2.0]
        assert cluster2.run(count_gloo_resources) == initial


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
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates them
        return float(functional.all_reduce(torch.ones(1)))


def test_forming_a_group_keeps_the_exception_hook(cluster2: dtkit.Cluster):
    before = cluster2.run(get_excepthook_id)
    cluster2._engine_group.membership.form_process_group()
    assert cluster2.run(get_excepthook_id) == before


def get_excepthook_id() -> int:
    return id(sys.excepthook)


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 50_000), torch.nn.ReLU(), torch.nn.Linear(50_000, 3))


def count_large_tensors() -> int:
    gc.collect()
    return sum(type(t) in (torch.Tensor, torch.nn.Parameter) and t.numel() > 100_000 for t in gc.get_objects())


def count_replicas() -> int:
    from torch.nn.parallel import DistributedDataParallel

    gc.collect()
    return sum(isinstance(item, DistributedDataParallel) for item in gc.get_objects())

"""Processes and files of a cluster, and the check that none of them is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from tests.support.small import data

if TYPE_CHECKING:
    import dtkit


Process = tuple[int, float]


def list_processes(cluster: dtkit.Cluster, runtime: Path) -> set[Process]:
    """Return the processes of a cluster: engines, their nannies, the controller's parts, the reaper."""
    (folder,) = runtime.iterdir()
    engines = {node.pid for node in cluster.nodes}
    processes = {(p.pid, p.create_time()) for p in psutil.process_iter() if belongs_to_cluster(p, folder)}
    assert engines <= {pid for pid, _ in processes}
    assert len(processes) >= 2 * len(engines) + 2  # engines, their nannies, the controller and the reaper
    return processes


def belongs_to_cluster(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return str(folder) in process.cmdline() or process.environ().get("IPP_PROFILE_DIR") == str(folder)
    return False


def filter_alive(processes: set[Process]) -> set[Process]:
    return {p for p in processes if _is_alive(*p)}


def _is_alive(pid: int, created: float) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    return False


def list_shared_files(processes: set[Process]) -> set[str]:
    """Return the files in shared memory, or in the temporary folder, that one of these processes owns."""
    pids = {pid for pid, _ in processes}
    paths = set()
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for pid in pids:
            paths |= {str(path) for path in folder.glob(f"dtkit-{os.getuid()}-{pid}-*")}
    return paths


def wait_until_ended(processes: set[Process], timeout: float) -> set[Process]:
    """Return the processes that are still alive after `timeout` seconds."""
    waiting = []
    for pid, created in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                waiting.append(process)
    psutil.wait_procs(waiting, timeout=timeout)
    return filter_alive(processes)


def wait_until_empty(folder: Path, timeout: float) -> list[Path]:
    """Return what is in the folder after `timeout` seconds. The reaper removes the cluster's folder last."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while (remaining := list(folder.iterdir())) and time.monotonic() < deadline:
        pause.wait(0.05)
    return remaining


def make_large_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return data that is large enough to be sent through shared memory."""
    inputs, targets = data()
    return inputs.repeat(1000, 1), targets.repeat(1000)


def wait_until_stepping(run: dtkit.Run) -> None:
    stepping = threading.Event()
    unsubscribe = run.subscribe(lambda: run.status.step and stepping.set())
    assert run.status.step or stepping.wait(60)
    unsubscribe()


def assert_nothing_left(processes: set[Process], runtime: Path, timeout: float = 10) -> None:
    assert not wait_until_ended(processes, timeout)
    assert not wait_until_empty(runtime, timeout)
    assert not list_shared_files(processes)


def block_interpreter(flag: str) -> None:
    """Hold the GIL of rank 0 forever, so that neither its threads nor its signal handlers run."""
    if dist.get_rank() == 0:
        Path(flag).touch()
        # sleeps: under test: an engine that holds the GIL forever
        ctypes.PyDLL(None).sleep(1000)


def block_engines(cluster: dtkit.Cluster, folder: Path) -> None:
    """Block the interpreter of rank 0 and stop the process of rank 1."""
    flag = folder / "blocked"
    cluster.submit(block_interpreter, str(flag))
    deadline, pause = time.monotonic() + 30, threading.Event()
    while not flag.exists():
        assert time.monotonic() < deadline
        pause.wait(0.01)
    psutil.Process(cluster.nodes[1].pid).suspend()

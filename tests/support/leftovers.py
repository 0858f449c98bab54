"""What a cluster consists of, processes and files, and whether any of it is left."""

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


def family(cluster: dtkit.Cluster, runtime: Path) -> set[Process]:
    """Every process of a cluster: engines, their nannies, the controller's parts, the warden."""
    (folder,) = runtime.iterdir()
    engines = {node.pid for node in cluster.nodes}
    found = {(p.pid, p.create_time()) for p in psutil.process_iter() if belongs(p, folder)}
    assert engines <= {pid for pid, _ in found}
    assert len(found) >= 2 * len(engines) + 2  # an engine and its nanny each, the controller, the warden
    return found


def belongs(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return str(folder) in process.cmdline() or process.environ().get("IPP_PROFILE_DIR") == str(folder)
    return False


def alive(processes: set[Process]) -> set[Process]:
    return {p for p in processes if _lives(*p)}


def _lives(pid: int, created: float) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    return False


def files(processes: set[Process]) -> set[str]:
    """Files in shared memory, or in its stead among the temporary ones, that hang on one of these processes' lives."""
    pids = {pid for pid, _ in processes}
    found = set()
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for pid in pids:
            found |= {str(path) for path in folder.glob(f"dtkit-{os.getuid()}-{pid}-*")}
    return found


def until_gone(processes: set[Process], timeout: float) -> set[Process]:
    """Those that still live after `timeout` seconds."""
    waiting = []
    for pid, created in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                waiting.append(process)
    psutil.wait_procs(waiting, timeout=timeout)
    return alive(processes)


def until_empty(folder: Path, timeout: float) -> list[Path]:
    """What the folder still holds after `timeout` seconds: the warden removes the cluster's own as its last deed."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while (left := list(folder.iterdir())) and time.monotonic() < deadline:
        pause.wait(0.05)
    return left


def large() -> tuple[torch.Tensor, torch.Tensor]:
    """Data that does not travel inline: it goes through shared memory."""
    inputs, targets = data()
    return inputs.repeat(1000, 1), targets.repeat(1000)


def until_stepping(run: dtkit.Run) -> None:
    seen = threading.Event()
    unsubscribe = run.subscribe(lambda: run.status.step and seen.set())
    assert run.status.step or seen.wait(60)
    unsubscribe()


def assert_nothing_left(processes: set[Process], runtime: Path, timeout: float = 10) -> None:
    assert not until_gone(processes, timeout)
    assert not until_empty(runtime, timeout)
    assert not files(processes)


def hold_the_interpreter(sign: str) -> None:
    """Keep the GIL for ever: no thread of this process runs any more, and no signal handler of Python's."""
    if dist.get_rank() == 0:
        Path(sign).touch()
        # sleeps: under test: an engine that holds the GIL forever
        ctypes.PyDLL(None).sleep(1000)


def get_stuck(cluster: dtkit.Cluster, folder: Path) -> None:
    """One engine holds its interpreter, the other one is stopped."""
    sign = folder / "held"
    cluster.submit(hold_the_interpreter, str(sign))
    deadline, pause = time.monotonic() + 30, threading.Event()
    while not sign.exists():
        assert time.monotonic() < deadline
        pause.wait(0.01)
    psutil.Process(cluster.nodes[1].pid).suspend()

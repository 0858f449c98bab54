"""The process that loads torch once and forks a cluster's engines."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

import dtkit
from dtkit._util.deadline import wait_until
from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.devices import DevicePlan
from dtkit.cluster.forkserver.client import ForkServerClient
from dtkit.cluster.forkserver.engine import ENGINE_NAME
from dtkit.cluster.launchers.local import ForkingLauncher, choose_local_launcher
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster


@pytest.fixture
def broken_client(tmp_path: Path) -> Iterator[ForkServerClient]:
    """Client of a server whose torch can't be loaded."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "torch.py").write_text("raise ImportError('libtorch.so has the wrong ABI')")
    (tmp_path / "folder").mkdir()
    path = f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    client = ForkServerClient(tmp_path / "folder", {"PYTHONPATH": path})
    yield client
    client.wait(timeout=10)


def test_an_error_while_torch_is_loaded_is_shown(broken_client: ForkServerClient):
    broken_client.start()
    with pytest.raises(ClusterError, match=r"(?s)could not be started.*libtorch.so has the wrong ABI"):
        broken_client.fork_engines(1, timeout=60)
    broken_client.wait(timeout=10)
    assert broken_client.find_server() is None


def test_an_agent_learns_of_it_while_it_waits_for_torch(broken_client: ForkServerClient):
    assert not broken_client.load(timeout=0)

    def ends() -> bool:
        assert not broken_client.load(timeout=1)
        return False

    with pytest.raises(ClusterError, match=r"(?s)could not be started.*libtorch.so has the wrong ABI"):
        wait_until(ends, timeout=60)


def test_engines_with_gpus_are_not_forked():
    plan = DevicePlan(("cuda:0", "cuda:1"), 1, "cpu:gloo,cuda:nccl")
    assert choose_local_launcher(LaunchConfig("local", plan, 60.0)) is not ForkingLauncher


def test_engines_are_forked_by_one_process_with_a_single_thread(cluster2: dtkit.Cluster):
    (parent,) = {psutil.Process(node.pid).ppid() for node in cluster2.nodes}
    server = psutil.Process(parent)
    assert "dtkit.cluster.forkserver" in server.cmdline()
    assert server.num_threads() == 1
    assert {psutil.Process(node.pid).name() for node in cluster2.nodes} == {ENGINE_NAME}


def test_each_engine_draws_other_numbers_and_gets_interrupts(cluster2: dtkit.Cluster):
    def draw() -> tuple[float, float, bool, bool]:
        import random

        import numpy as np

        has_handler = signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL)
        number = np.random.rand()  # noqa: NPY002 - as users do
        reaper = getattr(signal.getsignal(signal.SIGCHLD), "__module__", "")  # DataLoaders have one, too
        return random.random(), number, has_handler, reaper == "dtkit.cluster.forkserver.server"

    first, second = cluster2.run(draw)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2:] == (True, False)


def test_an_engine_is_replaced_also_without_the_server_that_forked_it():
    with dtkit.Cluster(2, threads=1) as cluster:
        pids = [node.pid for node in cluster.nodes]
        server = psutil.Process(psutil.Process(pids[0]).ppid())
        server.kill()
        os.kill(pids[1], signal.SIGKILL)
        assert wait_until(lambda: cluster.repair() == [1], timeout=60)
        survivor, replacement = cluster.run(os.getpid)
        assert survivor == pids[0]
        assert psutil.Process(replacement).ppid() not in (server.pid, os.getpid())
        folder = cluster.folder
    assert not folder.exists()
    assert not psutil.pid_exists(replacement)


@pytest.mark.usefixtures("adopts_orphans")
@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "too late"])
def test_a_closed_cluster_leaves_no_zombie(*, is_late: bool):
    """Also if an engine gets no processor in time for a friendly end, which the stop stands for."""
    with dtkit.Cluster(2, threads=1) as cluster:
        engines = [psutil.Process(node.pid) for node in cluster.nodes]
        processes = [*engines, *(child for engine in engines for child in engine.children(recursive=True))]
        assert len(processes) >= 4  # each engine has a nanny
        if is_late:
            engines[1].suspend()
    assert not [process for process in processes if process.is_running()]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(3), r"ended \(exit status 3\)\. If your code ended it, correct that first"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), r"ended \(killed by signal 11, SIGSEGV, a crash in compiled"),
    ],
    ids=["exit", "crash"],
)
def test_error_of_an_engine_that_ends_in_a_call_says_how(end: Callable[[], None], told: str):
    with dtkit.Cluster(1, threads=1) as cluster:
        with pytest.raises(dtkit.errors.EngineError, match=told):
            cluster.run(end)
        assert cluster.repair() == [0]
        assert cluster.run(lambda: 7) == [7]


def test_an_ended_engine_leaves_no_zombie():
    with dtkit.Cluster(1, threads=1) as cluster:
        engine = psutil.Process(cluster.nodes[0].pid)
        engine.kill()
        assert wait_until(lambda: not psutil.pid_exists(engine.pid), timeout=10)


def test_a_silent_client_does_not_stop_the_server(cluster2: dtkit.Cluster):
    from dtkit.cluster.forkserver.protocol import connect

    client = ForkServerClient(cluster2.folder, {})
    with connect(cluster2.folder, timeout=10) as connection:
        connection.sendall(b"no request\n")
    assert client.find_server() == psutil.Process(cluster2.nodes[0].pid).ppid()

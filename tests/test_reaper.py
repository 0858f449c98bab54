"""The reaper: the lock that shows that a notebook owns the cluster, and leases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dtkit._util import notebook, timeouts
from dtkit.cluster import reaper
from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.devices import plan_devices
from dtkit.cluster.reaper import _has_zombies as has_zombies
from dtkit.rpc.cluster_folder import JOB_FLAG
from tests.support.locks import is_owned

if TYPE_CHECKING:
    from pathlib import Path


def test_a_lock_is_held_until_its_last_holder_releases_it(tmp_path: Path):
    """A kernel that attaches to its own cluster has two Cluster objects, of which either may be closed first."""
    reaper.acquire_lock(tmp_path)
    reaper.acquire_lock(tmp_path)
    assert is_owned(tmp_path)
    reaper.release_lock(tmp_path)
    assert is_owned(tmp_path)
    reaper.release_lock(tmp_path)
    assert not is_owned(tmp_path)
    reaper.release_lock(tmp_path)  # once too often
    reaper.acquire_lock(tmp_path)
    assert is_owned(tmp_path)
    reaper.release_lock(tmp_path)


def test_a_forked_child_neither_holds_nor_releases_the_lock(tmp_path: Path):
    script = f"""
import os
from pathlib import Path
import psutil
import pytest

from dtkit.cluster import reaper
from dtkit.cluster.reaper import _has_zombies as has_zombies
from dtkit.rpc.cluster_folder import JOB_FLAG

folder = Path({str(tmp_path)!r})
reaper.acquire_lock(folder)
if (child := os.fork()) == 0:
    reaper.release_lock(folder)
    held = True
    try:
        reaper.acquire_lock(folder, timeout=0)
    except BlockingIOError:
        held = False
    os._exit(held)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        assert is_owned(tmp_path)
        parent.communicate("\n", timeout=30)
    assert not is_owned(tmp_path)


def make_folder(path: Path) -> Path:
    """Return a cluster's folder that no notebook owns, with a lease of nothing, or of an hour with a job."""
    path.mkdir()
    reaper.acquire_lock(path)
    reaper.release_lock(path)
    reaper.write_members(path, [], lease_s=0.0, job_lease_s=3600.0)
    return path


def test_job_in_memory_extends_the_lease(tmp_path: Path):
    busy, idle = make_folder(tmp_path / "busy"), make_folder(tmp_path / "idle")
    (busy / JOB_FLAG).touch()
    reapers = [reaper.start_reaper(folder) for folder in (busy, idle)]  # the busy one looks first
    try:
        reapers[1].wait(30)
        assert not idle.exists()
        assert busy.exists()
        (busy / JOB_FLAG).unlink()
        reapers[0].wait(30)
        assert not busy.exists()
    finally:
        for process in reapers:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize(("kernel", "seconds"), [(object(), timeouts.JOB_LEASE_S), (None, timeouts.LEASE_S)])
def test_a_job_extends_the_default_lease_of_a_notebook_alone(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, seconds: float
):
    """A script that was killed left its engines for half an hour, and nobody attaches to them."""
    monkeypatch.setattr(notebook, "get_shell", lambda: SimpleNamespace(kernel=kernel))
    plan = plan_devices(2, "cpu", threads=1)
    assert LaunchConfig("local", plan, timeout=60).job_lease_s == seconds
    assert LaunchConfig("local", plan, timeout=60, lease=5).job_lease_s == 5


def test_ends_the_processes_of_a_folder_that_is_being_removed(tmp_path: Path):
    """Whoever removes a folder removes its files first. Engines outlived a reaper that looked at that moment."""
    folder = make_folder(tmp_path / "cluster")
    (folder / JOB_FLAG).touch()
    waits_for_input = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", waits_for_input],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {reaper.MARKER_VARIABLE: str(folder)},
    ) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        (folder / reaper.LOCK_FILE).unlink()
        process = reaper.start_reaper(folder)
        assert process.wait(30) == 0
        assert engine.wait(30) != 0
        assert not folder.exists()


def test_a_server_reaps_what_an_engine_left_before_it_is_killed(tmp_path: Path):
    """On a busy machine, the server was killed between an engine and its nanny, whose zombie then stayed."""
    script = """
import os, signal, time
from dtkit._util.process import adopt_orphans

def reap(*_):
    os.waitpid(engine, 0)
    time.sleep(0.5)  # sleeps: another process has the processor
    os.waitpid(-1, 0)
    print("reaped both", flush=True)

adopt_orphans()
signal.signal(signal.SIGCHLD, reap)
if (engine := os.fork()) == 0:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nanny = os.fork()
    if nanny == 0:
        os._exit(0)
    os.waitid(os.P_PID, nanny, os.WEXITED | os.WNOWAIT)  # it is a zombie of this process now
    print("ready", flush=True)
    signal.pause()
while True:
    signal.pause()
"""
    folder = make_folder(tmp_path / "cluster")
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {reaper.MARKER_VARIABLE: str(folder)},
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        assert reaper.start_reaper(folder).wait(30) == 0
        assert server.stdout.read() == "reaped both\n"
        assert server.wait(30) == -signal.SIGKILL


@pytest.mark.usefixtures("adopts_orphans")
def test_a_process_that_is_left_alone_reaps_its_children_before_it_is_killed(tmp_path: Path, monkeypatch):
    """The fork server: its engines may end before it, and it may get no processor in time to reap them."""
    may_reap = tmp_path / "may_reap"
    script = f"""
import os, pathlib, signal, time
if (child := os.fork()) == 0:
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(child, flush=True)
while not pathlib.Path({str(may_reap)!r}).exists():
    time.sleep(0.01)
os.waitpid(child, 0)
signal.pause()
"""
    monkeypatch.setattr(reaper, "_has_zombies", lambda process: may_reap.touch() or has_zombies(process))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        reaper._kill_below_parents([psutil.Process(parent.pid)])
    assert not child.is_running()

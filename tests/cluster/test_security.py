"""Security of a running cluster: ports, keys and files. All tests share one cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

import dtkit
from dtkit.training.script_task import submit_script
from tests.support.leftovers import list_processes, make_large_data, wait_until_stepping
from tests.support.ports import ANSWER_S, collect_answers, list_mechanisms
from tests.support.small import LONG, check_usable, train
from tests.support.waiting import wait_until_run

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

LOOPBACK = {"127.0.0.1", "::1"}
NOBODY = 65534


@dataclasses.dataclass
class WatchedCluster:
    """A cluster and its runtime folder."""

    cluster: dtkit.Cluster
    runtime: Path

    @property
    def folder(self) -> Path:
        (folder,) = self.runtime.iterdir()
        return folder

    def read_connection_info(self, role: str = "client") -> dict[str, Any]:
        (path,) = self.folder.rglob(f"ipcontroller-*-{role}.json")
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def list_listening(self) -> list[tuple[str, int]]:
        """Return the addresses on which this process or one of the cluster listens."""
        addresses = set()
        for pid in {os.getpid(), *(pid for pid, _ in list_processes(self.cluster, self.runtime))}:
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = psutil.Process(pid).net_connections()
                addresses |= {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
        return sorted(addresses)


@pytest.fixture(scope="module")
def watched() -> Iterator[WatchedCluster]:
    """Cluster in a folder that everybody can enter, so that only the cluster's folder keeps others out."""
    runtime = Path(tempfile.mkdtemp(prefix="dtkit-test-"))
    runtime.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
        with dtkit.Cluster(2, threads=1) as cluster:
            yield WatchedCluster(cluster, runtime)
    shutil.rmtree(runtime)


# -- ports ------------------------------------------------------------------------------------------------------


def test_cluster_listens_on_loopback_only_without_http_and_with_a_key(watched: WatchedCluster):
    """The running training is not disturbed by attempts on all ports."""
    run = train(watched.cluster, rows=make_large_data(), steps=LONG)
    try:
        wait_until_stepping(run)
        addresses = watched.list_listening()
        assert {ip for ip, _ in addresses} <= LOOPBACK
        ports = {port for _, port in addresses}
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert min(ports) >= lowest  # the system chose them, so they are not predictable
        info_ports = {value for value in watched.read_connection_info().values() if isinstance(value, int)}
        assert info_ports <= ports
        assert info_ports
        http_answers = collect_answers(addresses, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert [port for port, answer in http_answers.items() if b"HTTP/" in answer] == []
        mechanisms = list_mechanisms(addresses)
        assert set(mechanisms.values()) == {b"CURVE"}
        assert info_ports <= set(mechanisms)
        assert ports - set(mechanisms)  # gloo's ports, which have no key (see the README)
        step = run.status.step
        wait_until_run(run, lambda: run.status.step > step)
    finally:
        run.pause()
    run.stop()


@pytest.mark.slow
def test_torchrun_script_listens_on_loopback_only(watched: WatchedCluster, tmp_path: Path):
    def long_script(path: str) -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        print("formed")
        while not Path(path).exists():
            pass
        dist.destroy_process_group()

    before = watched.list_listening()
    task = submit_script(watched.cluster._engine_group, long_script, (str(tmp_path / "go"),), {})
    try:
        formed = threading.Event()
        task.subscribe(lambda: len(task.output) == 2 and formed.set())
        assert formed.wait(30) or len(task.output) == 2
        during = watched.list_listening()
    finally:
        (tmp_path / "go").touch()
        task.result(30)
    assert set(during) - set(before)  # of the script's store and gloo
    assert {ip for ip, _ in during} <= LOOPBACK
    check_usable(watched.cluster)


# -- keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, zmq.curve_keypair()[0].decode()], ids=["without", "another"])
def test_client_without_the_key_cannot_connect(watched: WatchedCluster, key: str | None):
    info = watched.read_connection_info()
    assert info["curve_serverkey"]
    context = zmq.Context()
    context.setsockopt(zmq.SNDTIMEO, int(1000 * ANSWER_S))  # a socket whose peer refused it may wait in its first send
    try:
        with pytest.raises((TimeoutError, zmq.Again)):
            ipp.Client(info | {"curve_serverkey": key}, timeout=ANSWER_S, context=context).close()
    finally:
        context.destroy(linger=0)
    with contextlib.closing(ipp.Client(info, timeout=10)) as client:
        assert len(client.ids) == 2


def test_key_is_in_the_connection_files_and_nowhere_else(watched: WatchedCluster):
    """Command lines, which every user can read, displays, logs and errors don't have the key."""

    def fail() -> None:
        raise RuntimeError(" ".join(f"{name}={value}" for name, value in os.environ.items()))

    cluster = watched.cluster
    (run := train(cluster, steps=2)).wait(60)
    with pytest.raises(dtkit.errors.EngineError) as caught:
        cluster.run(fail)
    view = cluster._engine_group.transport.make_locked_view(cluster._engine_group.lock)  # type: ignore[attr-defined]  # as %%px has it
    cell = view.execute("import os; print(dict(os.environ), globals())", block=False)
    cell.get(20)
    shown = [repr(cluster), cluster._repr_html_(), repr(cluster.nodes), repr(run), repr(cluster.stacks()), *cell.stdout]
    shown += [str(caught.value), repr(caught.value)]
    for pid, _ in list_processes(cluster, watched.runtime):
        with contextlib.suppress(psutil.NoSuchProcess):
            shown.append(" ".join(psutil.Process(pid).cmdline()))
    keys = {
        info[name] for info in map(watched.read_connection_info, ("client", "engine")) for name in info if "key" in name
    }
    keys -= {""}  # no key for signatures, since CurveZMQ authenticates
    assert keys
    assert not any(key in text for key in keys for text in shown)
    holders = {
        path.name for path in watched.folder.rglob("*") if path.is_file() and any(k in _text(path) for k in keys)
    }
    assert all(re.fullmatch(r"ipcontroller-.*-(client|engine)\.json", name) for name in holders), holders


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


# -- files ------------------------------------------------------------------------------------------------------


def test_files_of_a_working_cluster_are_readable_by_the_user_only(watched: WatchedCluster, tmp_path: Path):
    """Files: snapshots, status, stacks, history, connection files, logs, the store of the group."""
    run = train(watched.cluster, steps=30, snapshot_every=10, checkpoint_every=10, checkpoint_dir=tmp_path / "saved")
    run.wait(60)
    watched.cluster.stacks()
    modes = {path.relative_to(watched.folder): _mode(path) for path in watched.folder.rglob("*")}
    expected = ("snapshots", "status-0.json", "stacks-1.txt", "cluster.json", "members.json", "owner.lock", "runs")
    assert {Path(name) for name in expected} <= modes.keys()
    assert {path.parts[0] for path in modes} >= {"log", "security", "job"}
    assert any(path.name.startswith("store-") for path in modes)
    assert any(path.suffix == ".safetensors" for path in modes)
    assert _mode(watched.folder) == 0o700
    # Files in snapshots/ have the modes of checkpoints; the folder itself is private.
    private = {path: mode for path, mode in modes.items() if path.parts[0] != "snapshots" or len(path.parts) == 1}
    assert {path: oct(mode or 0) for path, mode in private.items() if mode not in (0o600, 0o700, None)} == {}


def _mode(path: Path) -> int | None:
    """Return a file's mode, or None if it was just replaced, as status files are."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_read_the_keys(watched: WatchedCluster):
    (path,) = watched.folder.rglob("ipcontroller-*-client.json")
    assert subprocess.run(["ls", watched.runtime], user=NOBODY, check=True, timeout=10, capture_output=True).stdout
    for command in (["cat", path], ["ls", watched.folder]):
        done = subprocess.run(command, user=NOBODY, check=False, timeout=10, capture_output=True, text=True)
        assert done.returncode != 0
        assert "Permission denied" in done.stderr

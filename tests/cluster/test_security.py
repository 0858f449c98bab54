"""What a running cluster opens, to whom, and what it says: ports, keys, files. One cluster of its own for all of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

import dtkit
from tests.support.leftovers import family, large, until_stepping
from tests.support.small import LONG, check_usable, train

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

LOOPBACK = {"127.0.0.1", "::1"}
PATIENCE_S = 1.0  # for a port to answer: they are on this machine
NOBODY = 65534
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
"""How ZMTP 3.1 begins (rfc.zeromq.org/spec/37): signature and version. The answer, 64 bytes, names the mechanism that
the other side insists on."""


@dataclasses.dataclass
class Watched:
    """A cluster, and where it keeps what only its user may see."""

    cluster: dtkit.Cluster
    runtime: Path

    @property
    def folder(self) -> Path:
        (found,) = self.runtime.iterdir()
        return found

    def info(self, who: str = "client") -> dict[str, Any]:
        (path,) = self.folder.rglob(f"ipcontroller-*-{who}.json")
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def listening(self) -> list[tuple[str, int]]:
        """Where any process of the cluster takes connections, and this one."""
        found = set()
        for pid in {os.getpid(), *(pid for pid, _ in family(self.cluster, self.runtime))}:
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = psutil.Process(pid).net_connections()
                found |= {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
        return sorted(found)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """Below a folder that everybody can enter, so that the cluster's own is what keeps others out."""
    runtime = Path(tempfile.mkdtemp(prefix="dtkit-test-"))
    runtime.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
        with dtkit.Cluster(2, threads=1) as cluster:
            yield Watched(cluster, runtime)
    shutil.rmtree(runtime)


def answers(addresses: list[tuple[str, int]], message: bytes) -> dict[int, bytes]:
    """What comes back from each port within a moment, all asked at once."""
    with contextlib.ExitStack() as stack:
        asked = {stack.enter_context(socket.create_connection(address, 2)): address[1] for address in addresses}
        for sock in asked:
            sock.sendall(message)
        found = dict.fromkeys(asked.values(), b"")
        deadline, waiting = time.monotonic() + PATIENCE_S, set(asked)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for sock in select.select(waiting, [], [], left)[0]:
                part = b""
                with contextlib.suppress(ConnectionResetError):
                    part = sock.recv(4096)
                found[asked[sock]] += part
                if not part:
                    waiting.discard(sock)
    return found


# -- ports ------------------------------------------------------------------------------------------------------


def test_nothing_listens_off_loopback_nothing_speaks_http_and_zeromq_wants_a_key(watched: Watched):
    """While a run trains. It is not disturbed by somebody who tries all ports."""
    run = train(watched.cluster, rows=large(), steps=LONG)
    try:
        until_stepping(run)
        addresses = watched.listening()
        assert {ip for ip, _ in addresses} <= LOOPBACK
        ports = {port for _, port in addresses}
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert min(ports) >= lowest  # the system chose them: none is a port that somebody could know
        known = {value for value in watched.info().values() if isinstance(value, int)}
        assert known <= ports
        assert known
        web = answers(addresses, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert [port for port, answer in web.items() if b"HTTP/" in answer] == []
        greeted = answers(addresses, GREETING)
        mechanisms = {port: a[12:32].rstrip(b"\0") for port, a in greeted.items() if a[:1] == b"\xff"}
        assert set(mechanisms.values()) == {b"CURVE"}
        assert known <= set(mechanisms)
        assert ports - set(mechanisms)  # gloo's: the README says that no key guards them
        step = run.status.step
    finally:
        run.pause()
    assert run.status.step > step
    run.stop()


def test_nothing_listens_off_loopback_while_a_script_makes_its_own_group(watched: Watched, tmp_path: Path):
    def long_script(path: str) -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        print("formed")
        while not Path(path).exists():
            pass
        dist.destroy_process_group()

    before = watched.listening()
    task = watched.cluster._submit(long_script, (str(tmp_path / "go"),), {}, own_group=True)
    try:
        formed = threading.Event()
        task.subscribe(lambda: len(task.output) == 2 and formed.set())
        assert formed.wait(30) or len(task.output) == 2
        during = watched.listening()
    finally:
        (tmp_path / "go").touch()
        task.result(30)
    assert set(during) - set(before)  # the script's store, and its gloo
    assert {ip for ip, _ in during} <= LOOPBACK
    check_usable(watched.cluster)


# -- keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, zmq.curve_keypair()[0].decode()], ids=["without", "another"])
def test_a_client_without_the_key_cannot_connect(watched: Watched, key: str | None):
    info = watched.info()
    assert info["curve_serverkey"]
    with pytest.raises(TimeoutError):
        ipp.Client(info | {"curve_serverkey": key}, timeout=PATIENCE_S).close()
    with contextlib.closing(ipp.Client(info, timeout=10)) as client:
        assert len(client.ids) == 2


def test_the_key_is_in_the_connection_files_and_nowhere_else(watched: Watched):
    """Not on a command line, which every user of the machine can read; not in what is shown, logged or raised."""

    def fail() -> None:
        raise RuntimeError(" ".join(f"{name}={value}" for name, value in os.environ.items()))

    cluster = watched.cluster
    (run := train(cluster, steps=2)).wait(60)
    with pytest.raises(dtkit.errors.EngineError) as found:
        cluster.run(fail)
    view = cluster._transport.make_locked_view(cluster._lock)  # type: ignore[attr-defined]  # as %%px has it
    cell = view.execute("import os; print(dict(os.environ), globals())", block=False)
    cell.get(20)
    shown = [repr(cluster), cluster._repr_html_(), repr(cluster.nodes), repr(run), repr(cluster.stacks()), *cell.stdout]
    shown += [str(found.value), repr(found.value)]
    for pid, _ in family(cluster, watched.runtime):
        with contextlib.suppress(psutil.NoSuchProcess):
            shown.append(" ".join(psutil.Process(pid).cmdline()))
    keys = {info[name] for info in map(watched.info, ("client", "engine")) for name in info if "key" in name}
    keys -= {""}  # the signatures' key: CurveZMQ authenticates, so there is none
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


def test_all_files_of_a_cluster_at_work_are_the_user_s_alone(watched: Watched, tmp_path: Path):
    """Snapshots, status files, stacks, the run's history, connection files, logs, where the group meets."""
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
    # What lies in snapshots/ is written as any checkpoint is; its folder is closed a second time.
    inside = {path: mode for path, mode in modes.items() if path.parts[0] != "snapshots" or len(path.parts) == 1}
    assert {path: oct(mode or 0) for path, mode in inside.items() if mode not in (0o600, 0o700, None)} == {}


def _mode(path: Path) -> int | None:
    """None for what was there a moment ago: engines write their status anew all the time."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="acts as another user, which only root can")
def test_another_user_cannot_read_the_keys(watched: Watched):
    (path,) = watched.folder.rglob("ipcontroller-*-client.json")
    assert subprocess.run(["ls", watched.runtime], user=NOBODY, check=True, timeout=10, capture_output=True).stdout
    for command in (["cat", path], ["ls", watched.folder]):
        done = subprocess.run(command, user=NOBODY, check=False, timeout=10, capture_output=True, text=True)
        assert done.returncode != 0
        assert "Permission denied" in done.stderr

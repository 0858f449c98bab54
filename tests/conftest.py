"""Fixtures of all tests. A fixture that only one file needs belongs in that file."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dtkit
from dtkit.testing.fake_transport import FakeTransport
from tests.support.hosts import network as networks
from tests.support.hosts import slurm as slurms
from tests.support.hosts import ssh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts.network import Network
    from tests.support.hosts.slurm import Slurm

# Set before any test imports torch: on two cores, processes with two threads each slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def cluster() -> Iterator[dtkit.Cluster]:
    """A cluster over two doubles of engines; that of tests/cluster has real ones."""
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of one megabyte; the test is skipped where this user can't mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "dtkit-test", str(folder)]
    if shutil.which("mount") is None or subprocess.call(mount, stderr=subprocess.DEVNULL, timeout=10):
        pytest.skip("this user has no right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)


# -- several hosts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def session_network() -> Iterator[Network]:
    """Network of three hosts."""
    with networks.make_network(3) as network:
        yield network


@pytest.fixture
def network(session_network: Network) -> Iterator[Network]:
    """Network of three hosts, all of them on and connected. A test may cut cables and power."""
    yield session_network
    session_network.repair()


@pytest.fixture(scope="session")
def session_ssh_config(session_network: Network) -> Path:
    """Configuration with which ssh knows the hosts by name."""
    networks.require(*ssh.PROGRAMS)
    return ssh.start_ssh(session_network)


@pytest.fixture
def ssh_config(network: Network, session_ssh_config: Path) -> Path:
    """Configuration with which ssh knows the hosts by name."""
    return session_ssh_config


@pytest.fixture(scope="session")
def session_slurm(session_network: Network) -> Iterator[Slurm]:
    """Slurm on the hosts."""
    networks.require(*slurms.PROGRAMS)
    with slurms.start_slurm(session_network) as slurm:
        yield slurm


@pytest.fixture
def slurm(session_slurm: Slurm, network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Slurm on the hosts, without jobs. Its commands find it by the environment."""
    monkeypatch.setenv("SLURM_CONF", str(session_slurm.config))
    yield session_slurm
    network.repair()
    session_slurm.repair()


@pytest.fixture
def adopts_orphans() -> Iterator[None]:
    """This process gets orphans of its descendants, and reaps none, like the first process of some containers."""
    libc, set_child_subreaper = ctypes.CDLL(None, use_errno=True), 36
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(set_child_subreaper, 0, 0, 0, 0) == 0

"""The hosts of other tests: separate, reachable, and able to lose cable and power."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.hosts.network import Network
    from tests.support.hosts.slurm import Slurm

pytestmark = pytest.mark.cluster

ANSWER = "import socket; s = socket.create_server(('', 7000)); s.settimeout(60); print('up', flush=True)\n"
ANSWER += "c, _ = s.accept()\nwhile data := c.recv(9): c.send(data)"


def test_hosts_have_names_processes_and_folders_of_their_own(network: Network):
    host1, host2 = network.hosts[:2]
    host1.run("touch", "/tmp/mine", "/dev/shm/mine")
    assert [host.run("hostname").strip() for host in (host1, host2)] == ["host1", "host2"]
    assert host1.run("ls", "/tmp", "/dev/shm").split().count("mine") == 2
    assert "mine" not in host2.run("ls", "/tmp", "/dev/shm")
    assert not Path("/dev/shm/mine").exists()
    assert " 1 " in host2.run("ps", "-A", "-o", "pid,comm").replace("\n", " ")
    assert network[host2.name] is host2


def _connect(network: Network) -> tuple[socket.socket, subprocess.Popen[str]]:
    """Connect to a server on the first host that answers what it is sent."""
    server = network.hosts[0].start(sys.executable, "-c", ANSWER, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    server.stdout.close()
    return socket.create_connection((network.hosts[0].address, 7000), timeout=30), server


def test_connection_survives_a_cable_that_is_cut_and_restored(network: Network):
    link, server = _connect(network)
    with link:
        network.hosts[0].cut()
        link.send(b"hello")
        link.settimeout(0.5)
        with pytest.raises(TimeoutError):
            link.recv(9)
        network.hosts[0].restore()
        link.settimeout(30)
        assert link.recv(9) == b"hello"
    server.wait(30)


def test_host_without_power_sends_nothing_and_comes_back_empty(network: Network):
    link, server = _connect(network)
    with link:
        network.hosts[0].run("touch", "/tmp/mine")
        network.hosts[0].power_off()
        server.wait(30)
        link.settimeout(0.5)
        with pytest.raises(TimeoutError):  # not the end of the connection
            link.recv(9)
    assert not network.hosts[0].is_on
    network.repair()
    assert "mine" not in network.hosts[0].run("ls", "/tmp")


def test_ssh_reaches_each_host_by_its_name(network: Network, ssh_config: Path):
    for host in network.hosts:
        login = ["ssh", "-F", str(ssh_config), host.name, "hostname; echo $PYTHONPATH"]
        done = subprocess.run(login, capture_output=True, text=True, check=True, timeout=30)
        assert done.stdout.split() == [host.name, *os.environ.get("PYTHONPATH", "").split()]


def test_slurm_runs_a_task_on_each_host_and_gives_it_a_gpu(slurm: Slurm):
    task = "echo $(hostname) $CUDA_VISIBLE_DEVICES"
    lines = slurm.call(
        "srun", "--nodelist=host1,host2", "--ntasks=4", "--gpus-per-task=1", "sh", "-c", task
    ).splitlines()
    assert sorted(lines) == ["host1 0", "host1 1", "host2 0", "host2 1"]
    wait_until(lambda: not slurm.list_jobs())


def test_processes_of_a_host_are_listed_however_they_were_started(network: Network):
    host, before = network.hosts[1], network.hosts[1].list_processes()
    sleeper = host.start("sleep", "600")
    wait_until(lambda: [p.name() for p in host.list_processes() if p not in before] == ["sleep"])
    for process in set(host.list_processes()) - set(before):
        process.kill()
    sleeper.wait(30)
    assert host.list_processes() == before

"""Wrong input for launchers of hosts: one sentence with the remedy, soon, and nothing is left here or there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import dtkit
from tests.support.hosts import network as networks
from tests.support.hosts.host import run as run_here
from tests.support.hosts.training import assert_nothing_left, make_mpi
from tests.support.waiting import ends_soon, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.hosts.network import Network
    from tests.support.hosts.slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TWO_HOSTS = ("host1:1", "host2:1")
VERSIONS = r"torch is 2\S+ in the notebook and 1.0.0 on the agent \(host\d\); they must be equal"


@pytest.fixture
def refuses(network: Network, runtime: Path) -> Iterator[Callable[..., None]]:
    """Check that a launcher is refused soon with a message, and that nothing is left."""

    def refuses(launcher: dtkit.MPI | dtkit.SSH | dtkit.Slurm, message: str, **options: Any) -> None:
        with ends_soon(), pytest.raises((dtkit.errors.ClusterError, ValueError), match=message) as caught:
            dtkit.Cluster(2, launcher=launcher, threads=1, **{"device": "cpu"} | options)
        assert "\n" not in str(caught.value)

    before = psutil.Process().children(recursive=True)
    yield refuses
    assert_nothing_left(network)
    wait_until(lambda: not runtime.exists() or not list(runtime.iterdir()), 30)
    wait_until(lambda: set(psutil.Process().children(recursive=True)) <= set(before), 30)


def use_another_key(ssh_config: Path, folder: Path) -> Path:
    """Return a configuration of ssh with a key that the hosts don't know."""
    config, key = folder / "config", folder / "other"
    lines = [line for line in ssh_config.read_text().splitlines() if "IdentityFile" not in line]
    config.write_text("\n".join([*lines, f"  IdentityFile {key}\n"]))
    run_here("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    return config


def use_a_closed_port(ssh_config: Path, folder: Path) -> Path:
    """Return a configuration of ssh with a port at which nothing listens."""
    config = folder / "config"
    config.write_text(ssh_config.read_text() + "  Port 2222\n")
    return config


def make_other_torch(network: Network) -> str:
    """Return a command that starts this Python with the metadata of another version of torch."""
    metadata = network.folder / "other" / "torch-1.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    return f'env PYTHONPATH="{network.folder}/other:$PYTHONPATH" {sys.executable}'


# -- SSH --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "options", "message"),
    [
        (("host9:2",), {}, r"host9: .*[Cc]ould not resolve hostname.*Correct the name"),
        (("host1:2",), {"python": "/no/python"}, r"host1: .*No such file.*Name the Python of the hosts"),
        (
            ("host1:2",),
            {"python": "apptainer exec img.sif python"},
            r"host1: .*apptainer: not found.*correct python=",
        ),
        (("host1:2",), {"python": "/usr/bin/python3 -E"}, r"No module named .*Install dtkit-jupyter in that Python"),
        (TWO_HOSTS, {"interface": "eth7"}, r"no interface 'eth7' with an address; there are .*lo \(127"),
        (TWO_HOSTS, {"device": "cuda"}, r"device='cuda', but not every host has a usable CUDA device"),
    ],
    ids=["unknown host", "no Python", "no container", "no dtkit", "wrong interface", "GPUs"],
)
def test_wrong_hosts_by_ssh(
    refuses: Callable[..., None], ssh_config: Path, hosts: tuple[str, ...], options: dict[str, Any], message: str
):
    python = options.pop("python", sys.executable)
    launcher = dtkit.SSH(hosts, python=python, ssh_options=["-F", str(ssh_config)])
    refuses(launcher, message, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (use_another_key, r"Permission denied.*ssh_options"),
        (use_a_closed_port, r"host1: .*Connection refused.*Start an SSH server there, or name its"),
    ],
)
def test_wrong_configuration_of_ssh(
    refuses: Callable[..., None], ssh_config: Path, tmp_path: Path, change: Any, message: str
):
    config = change(ssh_config, tmp_path)
    refuses(dtkit.SSH(["host1:2"], python=sys.executable, ssh_options=["-F", str(config)]), message)


def test_other_versions_by_ssh(refuses: Callable[..., None], ssh_config: Path, network: Network):
    refuses(dtkit.SSH(["host1:2"], python=make_other_torch(network), ssh_options=["-F", str(ssh_config)]), VERSIONS)


# -- MPI --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "options", "message"),
    [
        (("host1:1", "host9:1"), {}, r"mpirun has ended.*Could not resolve hostname host9.*Correct the name"),
        (TWO_HOSTS, {"python": "/no/python"}, r"mpirun has ended.*/no/python: No such file.*Name the Python"),
        (TWO_HOSTS, {"mpirun": "/no/mpirun"}, r"/no/mpirun is not on this notebook's PATH. Install Open MPI"),
        (TWO_HOSTS, {"address": "127.0.0.1"}, r"host\d can't reach .* at 127.0.0.1, port \d+: .*address="),
        (TWO_HOSTS, {"device": "cuda"}, r"device='cuda', but not every host has a usable CUDA device"),
    ],
    ids=["unknown host", "no Python", "no mpirun", "wrong address", "GPUs"],
)
def test_wrong_hosts_by_mpi(
    refuses: Callable[..., None],
    network: Network,
    ssh_config: Path,
    hosts: tuple[str, ...],
    options: dict[str, Any],
    message: str,
):
    networks.require("mpirun")
    device = options.pop("device", "cpu")
    refuses(make_mpi(network, ssh_config, hosts, **options), message, device=device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (use_another_key, r"mpirun has ended.*Permission denied.*name a key in ~/.ssh/config"),
        (use_a_closed_port, r"mpirun has ended.*Connection refused.*Start an SSH server there, or name its"),
    ],
)
def test_wrong_configuration_of_ssh_under_mpi(
    refuses: Callable[..., None], network: Network, ssh_config: Path, tmp_path: Path, change: Any, message: str
):
    networks.require("mpirun")
    refuses(make_mpi(network, change(ssh_config, tmp_path), TWO_HOSTS), message)


def test_other_versions_by_mpi(refuses: Callable[..., None], network: Network, ssh_config: Path):
    networks.require("mpirun")
    refuses(make_mpi(network, ssh_config, TWO_HOSTS, python=make_other_torch(network)), VERSIONS)


# -- Slurm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directives": ["--nodelist=host9"]}, r"Slurm refused the job: Invalid node name.*Partitions here: train \(3"),
        ({"partition": "nope"}, r"partition='nope' has no nodes, or doesn't exist. Partitions here: train \(3 nodes"),
        ({"gpus_per_node": 9}, r"Requested node configuration is not available.*gpu:2"),
        ({"python": "/no/python"}, r"Slurm job \d+ is FAILED.*/no/python: No such file.*Name the Python"),
        ({"setup": ["set -e", "nomodule load cuda"]}, r"Slurm job \d+ is FAILED.*nomodule: .*setup="),
    ],
    ids=["unknown host", "partition", "GPUs", "no Python", "setup"],
)
def test_wrong_request_to_slurm(
    refuses: Callable[..., None], slurm: Slurm, home: Path, options: dict[str, Any], message: str
):
    refuses(dtkit.Slurm(**{"nodes": 2} | options), message)
    assert slurm.list_jobs() == []
    assert list(home.rglob("slurm-*.log")) == []


def test_other_versions_by_slurm(refuses: Callable[..., None], slurm: Slurm, home: Path, network: Network):
    refuses(dtkit.Slurm(nodes=2, python=make_other_torch(network)), VERSIONS)
    assert slurm.list_jobs() == []
    assert list(home.rglob("slurm-*.log")) == []


UNREACHABLE = pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "ClusterName=dtkit",
            "ClusterName=dtkit\nSlurmctldPort=7999\nMessageTimeout=2",
            "Unable to contact slurm controller",
        ),
        ("/munge/socket", "/munge/none", "[Mm]unge"),
    ],
    ids=["closed port", "no key"],
)


@pytest.fixture
def misconfigure(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Replace a text in the configuration that Slurm's commands read."""

    def misconfigure(old: str, new: str) -> None:
        config = slurm.folder / "wrong.conf"
        config.write_text(slurm.config.read_text().replace(old, new))
        monkeypatch.setenv("SLURM_CONF", str(config))

    return misconfigure


@UNREACHABLE
def test_slurm_that_does_not_answer(
    refuses: Callable[..., None], misconfigure: Callable[[str, str], None], old: str, new: str, words: str
):
    misconfigure(old, new)
    refuses(dtkit.Slurm(nodes=2), rf"sinfo can't list Slurm's nodes: .*{words}.*try `sinfo` in a terminal")


# -- PBS, by Slurm's commands -----------------------------------------------------------------------------------


@pytest.fixture
def pbs(slurm: Slurm, network: Network, home: Path) -> Iterator[Callable[..., dtkit.Batch]]:
    """Make launchers, of which no job and no file may be left."""
    networks.require("qsub", "qstat", "qdel")
    yield lambda **options: dtkit.Batch("PBS", nodes=2, address=network.address, **options)
    assert slurm.list_jobs() == []
    assert list((home / ".cache" / "dtkit").iterdir()) == []


GPUS = "#PBS -V\n#PBS -o {output_file}\n#PBS -l nodes=1:gpus=9\n{program_and_args}\n"


def test_two_jobs_of_pbs_on_one_host(refuses: Callable[..., None], pbs: Callable[..., dtkit.Batch]):
    refuses(pbs(), r"two agents run on host1, .*: ask for whole hosts in template=, such as `#PBS -l nodes=1:ppn=4`")


def test_more_gpus_than_pbs_has(refuses: Callable[..., None], pbs: Callable[..., dtkit.Batch]):
    refuses(pbs(template=f"#!/bin/bash\n{GPUS}"), r"PBS refused the job: .*[Rr]equested .*not available")


def test_other_versions_by_pbs(refuses: Callable[..., None], pbs: Callable[..., dtkit.Batch], network: Network):
    refuses(pbs(python=make_other_torch(network), template=f"#!/bin/bash\n{WHOLE_HOST}"), VERSIONS)


WHOLE_HOST = GPUS.replace("gpus=9", "ppn=4")


@UNREACHABLE
def test_pbs_that_does_not_answer(
    refuses: Callable[..., None],
    pbs: Callable[..., dtkit.Batch],
    misconfigure: Callable[[str, str], None],
    old: str,
    new: str,
    words: str,
):
    misconfigure(old, new)
    refuses(pbs(), rf"PBS refused the job: .*{words}")

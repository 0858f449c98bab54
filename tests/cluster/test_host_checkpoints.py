"""Checkpoints of hosts that don't see the notebook's folder: each host has its own /tmp."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import dtkit
from dtkit.checkpoint.remote_files import placed_on_hosts
from tests.support.hosts import scenarios
from tests.support.hosts.training import assert_exact, assert_nothing_left, make_wide_model, train, train_slowly
from tests.support.recovery import wait_for_step
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.hosts.network import Network

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(session_ssh_config: Path, session_network: Network) -> Iterator[dtkit.Cluster]:
    """Cluster with one engine on each of two hosts."""
    hosts = dtkit.SSH(["host1:1", "host2:1"], python=sys.executable, ssh_options=["-F", str(session_ssh_config)])
    with dtkit.Cluster(2, launcher=hosts, device="cpu", threads=1) as cluster:
        yield cluster
    assert_nothing_left(session_network)


def list_files(network: Network) -> list[str]:
    """Return the files of checkpoints on the hosts."""
    command = ("sh", "-c", "find /tmp/dtkit-*/checkpoints -type f 2>/dev/null")
    return [line for host in network.hosts[:2] for line in host.run(*command, check=False).split()]


def test_checkpoints_are_gathered_from_hosts_and_sent_to_them(cluster: dtkit.Cluster, network: Network, tmp_path: Path):
    saved = tmp_path / "saved"
    run = train(cluster, 20, strategy=dtkit.Sharded(), checkpoint_every=10, checkpoint_dir=saved)
    run.wait(60)
    assert [checkpoint.step for checkpoint in dtkit.list_checkpoints(saved)] == [10, 20]
    assert all(checkpoint.verify_files() == [] for checkpoint in dtkit.list_checkpoints(saved))
    assert not [event.text for event in run.history.events if event.kind == "error"]
    wait_until(lambda: list_files(network) == [])
    run = train(cluster, 40, strategy=dtkit.Sharded(), resume_from=saved)
    run.wait(60)
    assert_exact(run)
    run.save(network.folder / "shared", timeout=60)  # all hosts see this folder
    wait_until(lambda: list_files(network) == [])


def test_a_full_disk_is_told_with_its_host_and_training_goes_on(
    cluster: dtkit.Cluster, network: Network, tmp_path: Path
):
    # its file needs more room than the status files that engines free all the time
    run = train_slowly(cluster, scenarios.LONG, model=make_wide_model())
    wait_for_step(run, 50)
    saved = run.save(tmp_path / "before")
    full = network["host1"]  # of rank 0, which writes the model
    full.run("mount", "-o", "remount,size=16M", "/tmp")  # or it would take half of the memory to fill it
    full.run("sh", "-c", "cat /dev/zero > /tmp/full", check=False)
    try:
        with pytest.raises(dtkit.errors.CheckpointError, match=r"rank 0 on host1: No space left on device"):
            run.save(tmp_path / "during")
        run.wait(60)
        assert_exact(run, make_wide_model())
        full.run("sh", "-c", "cat /dev/zero >> /tmp/full", check=False)  # what the failed checkpoint has freed
        files, names = (
            cluster._engine_group.transport.hosts.checkpoint_files,
            [path.name for path in saved.path.glob("rank-*")],
        )
        message = r"could not be sent to all hosts: host1: .*No space left"
        with (
            pytest.raises(dtkit.errors.CheckpointError, match=message),
            placed_on_hosts(files, saved.path, names, 2),
        ):
            pass
    finally:
        full.run("rm", "/tmp/full")
        full.run("mount", "-o", "remount,size=50%", "/tmp")
    run = train(cluster, saved.step + 50, make_wide_model(), resume_from=saved.path)
    run.wait(60)
    assert_exact(run, make_wide_model())

"""Notebook 07 as committed: on two hosts by SSH, and on this machine where SSH reaches none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.hosts.training import assert_nothing_left
from tests.support.notebook import ExecutedNotebook, check_claims, check_nothing_is_left, execute_and_watch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.hosts.network import Network

pytestmark = [pytest.mark.notebook, pytest.mark.slow]

NOTEBOOK = "notebooks/07_many_hosts.ipynb"
LEAST_CLAIMS = 7


def check_page(done: ExecutedNotebook) -> None:
    check_claims(done, least=LEAST_CLAIMS)
    assert "#SBATCH --gpus-per-node=8" in done.text("slurm.script()")
    assert "'exec ~/env/bin/python -m dtkit.cluster.agent'" in done.text('"gpu2:4"], python=')
    assert "PASS" in done.text("run.verify(200)")
    assert "image/png" in done.outputs("mesh = Mesh(")[0].data


def test_the_notebook_trains_on_hosts_that_ssh_reaches(
    root: Path, ssh_config: Path, network: Network, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DTKIT_HOSTS", "host1:1,host2:1")
    monkeypatch.setenv("DTKIT_SSH_OPTIONS", f"-F {ssh_config}")
    done = execute_and_watch(root / NOTEBOOK)
    check_page(done)
    text = done.text("cluster = dtkit.Cluster(")
    assert text.startswith("hosts by SSH: ")
    assert "host1" in text
    assert "host2" in text
    assert_nothing_left(network)


def test_the_notebook_uses_this_machine_without_ssh(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTKIT_HOSTS", "nobody.invalid:2")
    done = execute_and_watch(root / NOTEBOOK)
    check_page(done)
    assert done.text("cluster = dtkit.Cluster(").startswith("no SSH without a password, so this machine: local")
    check_nothing_is_left(done)

"""Launchers of ipyparallel's processes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import ipyparallel as ipp

from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.launchers.local import LocalLauncher


def test_a_reattached_cluster_prints_nothing_of_ipyparallel(tmp_path: Path):
    (tmp_path / "security").mkdir()
    written = ipp.Cluster(profile_dir=str(tmp_path), cluster_id="dtkit")
    Path(written.cluster_file).write_text(json.dumps(written.to_dict()))
    launcher = LocalLauncher.reattach(LaunchConfig.__new__(LaunchConfig), tmp_path)
    # In a notebook this logger prints "engine set stopped" into whatever cell runs.
    assert not launcher._cluster.log.isEnabledFor(logging.WARNING)

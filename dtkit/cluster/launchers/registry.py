"""Launchers for several hosts, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.cluster.launchers.hosts import HostLauncher

_HOMES = {"Batch": "batch", "MPI": "mpi", "SSH": "ssh", "Slurm": "slurm"}
"""Module of each class."""


def restore_launcher(fields: Mapping[str, Any]) -> HostLauncher:
    """Return the launcher that `HostLauncher.to_json` described."""
    name, values = fields["name"], {key: value for key, value in fields.items() if key != "name"}
    module = importlib.import_module(f"dtkit.cluster.launchers.{_HOMES[name]}")
    launcher: HostLauncher = getattr(module, name)(**values)
    return launcher

"""Versions that notebook and engines compare before anything else."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

from dtkit._util import installation
from dtkit.errors import EngineError, VersionMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.messages import Reply


def get_handshake() -> dict[str, object]:
    """Return versions, host, pid and import path of this process, without importing torch.

    The keys are a contract between versions of dtkit: only add to them.
    """
    return {
        "dtkit": installation.VERSION,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "cloudpickle": importlib.metadata.version("cloudpickle"),
        "torch": importlib.metadata.version("torch").partition("+")[0],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "path": list(sys.path),
    }


def check_reply(rank: int, reply: Reply[Any]) -> dict[str, Any]:
    """Return an engine's handshake. Raise VersionMismatchError if its versions differ from these, and EngineError
    if it has ended.
    """
    engine = reply.value
    if not isinstance(engine, dict):
        if reply.failure is not None and reply.failure.is_engine_gone:
            raise EngineError([reply.failure])
        reason = reply.failure.message if reply.failure else "no answer"
        raise VersionMismatchError(
            f"rank {rank} can't load dtkit {installation.VERSION}: {reason}. Install the same dtkit-jupyter "
            "where the engines run"
        )
    check_versions(engine, f"rank {rank}")
    return engine


def check_versions(engine: Mapping[str, Any], name: str) -> None:
    """Raise VersionMismatchError unless the versions of another process's handshake equal this process's."""
    notebook = get_handshake()
    for package in ("dtkit", "python", "cloudpickle", "torch"):
        if notebook[package] != engine.get(package):
            raise VersionMismatchError(
                f"{package} is {notebook[package]} in the notebook and {engine.get(package)} on {name} "
                f"({engine['host']}); they must be equal. Start the engines from the notebook's environment"
            )

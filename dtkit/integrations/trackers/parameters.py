"""A run's parameters as plain values: what was asked for, the engines, versions, and the git commit."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.installation import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dtkit.training.run import Run

PlainValue = str | int | float | bool
"""What trackers take as a parameter."""


def collect_parameters(run: Run, params: Mapping[str, Any]) -> dict[str, PlainValue]:
    """Return the parameters of a run, with those of the user. Other values than text and numbers become text."""
    values: dict[str, Any] = dict(dataclasses.asdict(run.spec))
    values |= dict(values.pop("settings"))
    values["parameters"] = (values.pop("model") or {}).get("parameters", 0)
    values |= {"learning_rate": run.lr, "nodes": run.spec.world_size} | _describe_nodes(run)
    values |= {"python": platform.python_version(), "dtkit": VERSION, "torch": importlib.metadata.version("torch")}
    values |= read_git_commit(Path.cwd())
    return dict(_flatten({**values, **params}))


def _describe_nodes(run: Run) -> dict[str, Any]:
    nodes = run.nodes
    devices = sorted({node.device.partition(":")[0] for node in nodes})
    return {"hosts": len({node.host for node in nodes}), "device": ", ".join(devices)}


def read_git_commit(folder: Path) -> dict[str, Any]:
    """Return the commit of the repository that a folder is in, and whether it was changed since; else nothing."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    status = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit} | ({} if status is None else {"git_changed": bool(status)})


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None where there is no git, or no repository."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],  # noqa: S607 - the user's git
            check=True,
            capture_output=True,
            text=True,
            timeout=timeouts.GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, PlainValue]]:
    """Yield plain values, those of nested dicts with names such as "optimizer.lr"."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{key}.")
        elif isinstance(value, tuple | list):
            yield key, ", ".join(map(str, value))
        elif isinstance(value, PlainValue):
            yield key, value
        else:
            yield key, str(value)

"""A run's parameters as plain values: its arguments, the engines, versions, and the git commit."""

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
"""Values that trackers accept as a parameter."""


def collect_parameters(run: Run, params: Mapping[str, Any]) -> dict[str, PlainValue]:
    """Return the parameters of a run, with those of the user. Other values than text and numbers become text."""
    values: dict[str, Any] = dict(dataclasses.asdict(run.spec))
    values |= dict(values.pop("settings"))
    del values["sources"], values["has_validation"]  # functions' sources are no parameters; `validation` is one already
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
    """Return the commit of a folder's repository and whether files have changed since; empty without a repository."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    status = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit} | ({} if status is None else {"git_changed": bool(status)})


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None without git or a repository."""
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
    """Yield plain values. Those of nested dicts have names such as "optimizer.lr"."""
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

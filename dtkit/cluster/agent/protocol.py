"""Messages between a notebook and the agents of its hosts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class AgentInfo:
    """An agent and its host."""

    host: str
    """Name of the host as the launcher gave it, else its own name."""
    hostname: str
    pid: int
    folder: str
    """The private folder of the cluster on that host."""
    address: str
    """Address at which the other hosts reach it."""
    interface: str
    cores: int
    gpus: int


@dataclasses.dataclass(frozen=True)
class MirrorRequest:
    """State of the notebook's folder that a host follows."""

    reader: str
    """Identifies the notebook; a new one receives everything again."""
    flags: frozenset[str]
    """Names of all flags: files without content that ask engines for something."""
    runs: frozenset[str]
    """Names of all runs' folders."""


@dataclasses.dataclass(frozen=True)
class MirrorReply:
    """Changes of a host's folder since the last reply to the same reader."""

    files: Mapping[str, bytes]
    """Content of new and changed files by path within the folder."""
    removed: Sequence[str]

"""Types of trackers: a run, its numbers by step, and the writer."""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dtkit.types import State


@dataclasses.dataclass(frozen=True)
class Point:
    """Numbers of one step, by name."""

    step: int
    """As in ``run.history``. For an evaluation, the number of updates before it."""
    time: float
    """Seconds since the epoch."""
    values: dict[str, float]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker stores it."""

    id: str
    """Text of letters, digits and hyphens, unique to the run. A resumed run keeps its id."""
    name: str
    tags: tuple[str, ...]
    is_resumed: bool
    """Whether the tracker may have this run already."""
    outdated_from: int | None = None
    """First step of which the tracker may have outdated points, because the run repeats steps after a checkpoint."""


class Writer(Protocol):
    """One run in a tracker, open for writing. All calls come from one thread at a time; each may raise."""

    def write_parameters(self, values: Mapping[str, Any]) -> None:
        """Store parameters of the run: text and numbers by name."""

    def write_points(self, points: Sequence[Point]) -> None:
        """Store numbers, in order."""

    def write_report(self, path: Path) -> None:
        """Store the report, an HTML file that is deleted afterwards."""

    def close(self, state: State) -> None:
        """End the run in its last state, which is RUNNING if another notebook continues it."""


def make_id(name: str) -> str:
    """Return a new id, made of the run's name and the time."""
    word = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "run"
    return f"{word}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"

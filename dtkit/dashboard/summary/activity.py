"""Activity of a run instead of taking steps: recovering from a lost node, or waiting for a stuck one.

Meanwhile the last steps are no guide to the present, so views show neither a throughput nor a remaining time.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dtkit._util import formatting
from dtkit.dashboard.run_view import RunView
from dtkit.dashboard.summary.comparison import KEPT_STATE
from dtkit.dashboard.summary.lost_nodes import update_lost_nodes
from dtkit.dashboard.summary.stall import STUCK_GLYPH, find_stall, format_position
from dtkit.dashboard.summary.timing import format_nodes
from dtkit.errors import NonFiniteError
from dtkit.history.divergence import find_divergence, find_past_divergence
from dtkit.history.no_learning import find_no_learning
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.dashboard.summary.lost_nodes import LostNodes
    from dtkit.types import Event, Status

RECOVERING_GLYPH = "↻"
_NEWER_KINDS = frozenset({"pause", "resume", "lr", "error", "stop", "stuck", "save", "lost"})
"""Kinds of events that replace the text on a repair."""
_MAX_EVENTS = 300


@runtime_checkable
class _HasStatus(Protocol):
    @property
    def status(self) -> Status: ...


@dataclasses.dataclass(frozen=True)
class Activity:
    """An activity of a run and its start, so that a view can count the seconds."""

    glyph: str
    text: str
    seconds: float

    def format_short(self) -> str:
        """Return a text such as ``↻ recovering node 1, 4 s``."""
        return f"{self.glyph} {self.text}, {formatting.format_clock(self.seconds)}"


def name_state(run: RunView) -> str:
    """Return the word for a run's state: "ready" if it is paused since it was made, "diverged" if it ended so.

    A run that an error paused has it: "paused, not finite" or "paused, error", as in the dashboard. Once such a
    run is stopped, it is "stopped, not finite". "completed, diverged" had diverged, and is not back at its best.
    "completed, learned nothing" has a loss that is not below its first one.
    """
    status, error = run.status, run.exception
    if status.state is State.PAUSED and error is not None:
        return f"paused, {'not finite' if isinstance(error, NonFiniteError) else 'error'}"
    if status.state is State.PAUSED and not status.elapsed_s:
        return "ready"
    has_ended_well = status.state in (State.COMPLETED, State.STOPPED)
    if has_ended_well and isinstance(error, NonFiniteError):
        return f"{status.state.value}, not finite"  # as before it was stopped or replaced
    if has_ended_well and find_divergence(run.history) is not None:
        return "diverged"
    end = name_bad_end(run) if has_ended_well else ""
    return f"{status.state.value}, {end}" if end else status.state.value


def name_bad_end(run: RunView) -> str:
    """Return "diverged" for an ended run whose loss is not back at its best, "learned nothing", or an empty text."""
    if not run.status.state.has_ended:
        return ""
    if find_past_divergence(run.history) is not None:
        return "diverged"
    return "" if find_no_learning(run.history) is None else "learned nothing"


def read_state(run: object) -> str:
    """Return the word for the state of a run, or of another object with a status; a history has none."""
    if isinstance(run, RunView):
        return name_state(run)
    return run.status.state.value if isinstance(run, _HasStatus) else KEPT_STATE


def find_activity(run: RunView, lost_nodes: LostNodes | None = None) -> Activity | None:
    """Return the activity of a run; None while it takes steps, or is idle."""
    if run.status.state not in (State.RUNNING, State.PENDING):
        return None
    lost_nodes = update_lost_nodes({}, run.history.events) if lost_nodes is None else lost_nodes
    if lost_nodes:
        times = [event.time for event in run.history.events[-_MAX_EVENTS:] if event.kind == "lost"]
        since = max(0.0, time.time() - times[-1]) if times else 0.0
        return Activity(RECOVERING_GLYPH, f"recovering {format_nodes(sorted(lost_nodes))}", since)
    stall = find_stall(run)
    if stall is None:
        return None
    return Activity(STUCK_GLYPH, format_position(stall), stall.stalled_s)


def describe_last_repair(events: Sequence[Event]) -> str | None:
    """Return how the last loss of nodes ended, such as ``node 1 replaced in 9.1 s``; None if something is newer."""
    for event in reversed(events[-_MAX_EVENTS:]):
        if event.kind in _NEWER_KINDS:
            return None
        if event.kind == "repair":
            return event.notice
    return None

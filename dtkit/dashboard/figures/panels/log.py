"""The last events of a run, as in the live view's log; evaluations are in the charts."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.text_table import LEFT, prepare_axes, write
from dtkit.dashboard.summary.event_marks import MARKED_EVENTS
from dtkit.dashboard.summary.notices import name_event_node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History
    from dtkit.types import Event

_MAX_EVENTS, _MAX_LINES_OF_EVENT = 14, 3
_TEXT_CHARS = 62
_STEP_AT, _TEXT_AT = 0.235, 0.255  # of the width; steps end at theirs
URGENT_KINDS = ("error", "lost", "stuck", "diverged")
"""Kinds of events that are alerts."""


def make_panel(run: RunView) -> Callable[[Axes, History], None]:
    """Return the panel of a run's events."""
    events = run.history.events
    shown, note = _wrap_events(events), describe_shown(events)

    def draw(ax: Axes, _history: History) -> None:
        prepare_axes(ax, sum(len(lines) for _, lines in shown), "Log", note)
        y = 1.7
        for event, lines in shown:
            color = style.ALERT_COLOR if event.kind in URGENT_KINDS else style.TEXT_COLOR
            write(ax, LEFT, y, format_clock(event), style.MUTED_COLOR)
            write(ax, _STEP_AT, y, f"{event.step:,}", style.MUTED_COLOR, ha="right")
            for line in lines:
                write(ax, _TEXT_AT, y, line, color, gid="event")
                y += 1

    return draw


def count_lines(run: RunView) -> int:
    """Return the lines of the log."""
    return sum(len(lines) for _, lines in _wrap_events(run.history.events))


def select_events(events: Sequence[Event]) -> list[Event]:
    """Return the last events, of which prints give way to those that say what happened to the run."""
    events = [event for event in events if event.kind != "evaluation"]
    if len(events) > _MAX_EVENTS:
        by_weight = sorted(range(len(events)), key=lambda k: (events[k].kind in MARKED_EVENTS, k))
        events = [events[k] for k in sorted(by_weight[-_MAX_EVENTS:])]
    return events


def describe_shown(events: Sequence[Event]) -> str:
    """Return a note on the events that are not shown; an empty text if all are."""
    num_shown, num_all = len(select_events(events)), sum(event.kind != "evaluation" for event in events)
    return f"{num_shown} of {num_all:,} events" if num_all > num_shown else ""


def format_clock(event: Event) -> str:
    """Return the time of an event as in a log."""
    return time.strftime("%H:%M:%S", time.localtime(event.time))


def format_event(event: Event) -> str:
    """Return an event in one line."""
    return name_event_node(event) + formatting.sanitize_text(event.text, 400)


def _wrap_events(events: Sequence[Event]) -> list[tuple[Event, list[str]]]:
    shown = []
    for event in select_events(events):
        lines = textwrap.wrap(
            format_event(event), _TEXT_CHARS, max_lines=_MAX_LINES_OF_EVENT, placeholder=" …", break_on_hyphens=False
        )
        shown.append((event, lines or [""]))
    return shown

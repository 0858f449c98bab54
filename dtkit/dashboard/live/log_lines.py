"""Lines of a page's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.dashboard.summary.event_marks import MARKED_EVENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import Event

MAX_LOG_LINES = 200
"""Lines of the log that a page keeps, besides the marked events."""
MAX_MARKS = 60
"""Events that a page marks on the step axis."""


def select_log_events(events: Sequence[Event]) -> list[Event]:
    """Return the events of a page's log: the last ones, and the last marked ones, which many prints don't push out.

    Evaluations are not among them, since a page has a table of these.
    """
    lines = [event for event in events if event.kind != "evaluation"]
    marked = [event for event in lines[:-MAX_LOG_LINES] if event.kind in MARKED_EVENTS]
    return [*marked[-MAX_MARKS:], *lines[-MAX_LOG_LINES:]]


def build_log_line(event: Event) -> dict[str, Any]:
    """Return an event as a line of the log. The page never reads its text as markup."""
    return {
        "step": event.step,
        "kind": event.kind,
        "text": formatting.sanitize_text(event.text, 200),
        "time": event.time,
        "rank": event.rank,
    }

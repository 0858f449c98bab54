"""The marks of events on the step axis of charts: their kinds, glyphs and legend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.summary.timing import format_nodes
from dtkit.health.stall_report import STOPPED_WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import Event

EVENT_GLYPHS = {
    "pause": "‖", "resume": "▶", "lr": "lr", "error": "✕", "stop": "■", "lost": "†", "repair": "+", "save": "↓",
    "stuck": "⊘", "diverged": "↗",
}  # fmt: skip
"""Glyphs by kind of event."""
MARKED_EVENTS = frozenset(EVENT_GLYPHS)
"""Kinds of events with a mark on the step axis. The others are in the log only."""
MARK_SEPARATOR = " · "
"""Between two entries of the legend of marks; as in ``chart/marks.js``."""
_EVENT_WORDS = {
    "pause": "paused", "resume": "resumed", "lr": "new learning rate", "error": "error", "stop": "stopped",
    "lost": "lost", "repair": "repaired", "save": "saved", "stuck": "stuck",
    "diverged": "diverged",
}  # fmt: skip


def describe_event_marks(events: Sequence[Event]) -> str:
    """Return a legend of the marks of these events, with their nodes; an empty text without marks."""
    ranks_by_text: dict[tuple[str, str], set[int]] = {}
    for event in events:
        if event.kind in MARKED_EVENTS:
            ranks = ranks_by_text.setdefault((EVENT_GLYPHS[event.kind], _name_event(event)), set())
            ranks.update(() if event.rank is None else {event.rank})
    nodes = [f"{format_nodes(sorted(ranks))} " if ranks else "" for ranks in ranks_by_text.values()]
    return MARK_SEPARATOR.join(
        f"{glyph} {name}{word}" for (glyph, word), name in zip(ranks_by_text, nodes, strict=True)
    )


def _name_event(event: Event) -> str:
    """Return the word for an event. A stall may be that of a process that was stopped."""
    return "stopped" if event.kind == "stuck" and STOPPED_WORDS in event.text else _EVENT_WORDS[event.kind]

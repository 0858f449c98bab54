"""Marks of events in the panels of a run: a thin line and a glyph at the event's step, and their legend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.figures.style import COLORS, MUTED_COLOR
from dtkit.dashboard.summary.notices import MARKED_EVENTS
from dtkit.dashboard.summary.timing import format_nodes
from dtkit.health.stall_report import STOPPED_WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from dtkit.types import Event

_EVENT_GLYPHS = {
    "pause": "‖", "resume": "▶", "lr": "lr", "error": "✕", "stop": "■", "lost": "†", "repair": "+", "save": "↓",
    "stuck": "⊘", "diverged": "↗",
}  # fmt: skip
_EVENT_WORDS = {
    "pause": "paused", "resume": "resumed", "lr": "new learning rate", "error": "error", "stop": "stopped",
    "lost": "lost", "repair": "repaired", "save": "saved", "stuck": "stuck",
    "diverged": "diverged",
}  # fmt: skip
_URGENT_EVENTS = ("error", "lost", "stuck", "diverged")
_MAX_MARKED_EVENTS = 20
_MAX_GLYPHS = 4


def mark_events(ax: Axes, events: Sequence[Event]) -> None:
    """Draw a thin line and a glyph at the step of each marked event."""
    left, right = ax.get_xlim()
    signs: list[tuple[int, str, list[str]]] = []  # step, color, and glyphs of the events there, each once
    for event in [event for event in events if event.kind in MARKED_EVENTS][-_MAX_MARKED_EVENTS:]:
        color = COLORS[5] if event.kind in _URGENT_EVENTS else MUTED_COLOR
        ax.axvline(event.step, 0, 0.94, color=color, linewidth=0.8, linestyle=":", gid=f"event-{event.kind}")
        glyph = _EVENT_GLYPHS.get(event.kind, "•")
        if signs and event.step < signs[-1][0] + (0.01 + 0.015 * len(signs[-1][2])) * (right - left):
            signs[-1][2].append(glyph)  # a text of its own would cover the previous one
        else:
            signs.append((event.step, color, [glyph]))
    for step, color, glyphs in signs:
        ax.annotate(
            _join_glyphs(list(dict.fromkeys(glyphs))[-_MAX_GLYPHS:]), (step, 1.0), xycoords=("data", "axes fraction"),
            va="top", ha="center", fontsize=8, color=color, annotation_clip=True,
        )  # fmt: skip


def _join_glyphs(glyphs: Sequence[str]) -> str:
    """Return glyphs as one text, with room around letters: a pause before an l would be read as a part of it."""
    return "".join(f" {glyph} " if len(glyph) > 1 else glyph for glyph in glyphs).strip()


def describe_event_marks(events: Sequence[Event]) -> str:
    """Return a legend of the marks of these events, with their nodes; an empty text without marks."""
    ranks_by_text: dict[tuple[str, str], set[int]] = {}
    for event in events:
        if event.kind in MARKED_EVENTS:
            ranks = ranks_by_text.setdefault((_EVENT_GLYPHS[event.kind], _name_event(event)), set())
            ranks.update(() if event.rank is None else {event.rank})
    nodes = [f"{format_nodes(sorted(ranks))} " if ranks else "" for ranks in ranks_by_text.values()]
    return "   ".join(f"{glyph} {name}{word}" for (glyph, word), name in zip(ranks_by_text, nodes, strict=True))


def _name_event(event: Event) -> str:
    """Return the word for an event. A stall may be that of a process that was stopped."""
    return "stopped" if event.kind == "stuck" and STOPPED_WORDS in event.text else _EVENT_WORDS[event.kind]

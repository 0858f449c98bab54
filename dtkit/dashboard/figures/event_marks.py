"""Marks of events in the panels of a run: a thin line and a glyph at the event's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.figures.style import COLORS, MUTED_COLOR
from dtkit.dashboard.summary.event_marks import EVENT_GLYPHS, MARKED_EVENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from dtkit.types import Event

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
        glyph = EVENT_GLYPHS[event.kind]
        if signs and event.step < signs[-1][0] + (0.01 + 0.02 * len(signs[-1][2])) * (right - left):
            signs[-1][2].append(glyph)  # a text of its own would cover the previous one
        else:
            signs.append((event.step, color, [glyph]))
    for step, color, glyphs in signs:
        ax.annotate(
            _join_glyphs(list(dict.fromkeys(glyphs))[-_MAX_GLYPHS:]), (step, 1.0), xycoords=("data", "axes fraction"),
            va="top", ha="center", fontsize=8, color=color, annotation_clip=True,
        )  # fmt: skip


def _join_glyphs(glyphs: Sequence[str]) -> str:
    """Return glyphs as one text, apart from each other: a pause before an l would be read as a part of it."""
    return "\u2009".join(glyphs)

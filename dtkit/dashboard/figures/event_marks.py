"""Marks of events in the panels of a run: a thin line and a glyph at the event's step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.figures.style import COLORS, MUTED_COLOR, set_title
from dtkit.dashboard.summary.event_marks import EVENT_GLYPHS, MARKED_EVENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from dtkit.types import Event

_URGENT_EVENTS = ("error", "lost", "stuck", "diverged")
_MAX_MARKED_EVENTS = 20
_MAX_GLYPHS = 6
_LETTER_PT = 7.0  # width of a letter of a sign, with the gap beside it
_GLYPH_PT, _NARROW_LETTER_PT, _DOT_PT = 6.0, 3.0, 4.0
_SIGN_PAD_PT, _TITLE_PAD_PT = 2.0, 15.0  # of signs, and of the title above them, above the axes
_AXES_SHARE = 0.8  # of the width of a column, which also has numbers and names


def mark_events(ax: Axes, events: Sequence[Event]) -> None:
    """Draw a thin line at the step of each marked event, and signs above the axes. Signs that would touch are one."""
    signs: list[_Sign] = []
    per_letter = _LETTER_PT * float(np.ptp(ax.get_xlim())) / _get_width_pt(ax)
    marked = [event for event in events if event.kind in MARKED_EVENTS][-_MAX_MARKED_EVENTS:]
    if marked:
        name, note = ax.get_title(loc="left"), ax.get_title(loc="right")
        set_title(ax, name, note, _TITLE_PAD_PT)  # the axes keep the range of their data
    for event in marked:
        color = COLORS[5] if event.kind in _URGENT_EVENTS else MUTED_COLOR
        at = min(event.step, ax.get_xlim()[1])  # the last step may have no values
        ax.axvline(at, color=color, linewidth=0.8, linestyle=":", gid=f"event-{event.kind}")
        signs.append(_Sign(at, at, {EVENT_GLYPHS[event.kind]: color}))
        while len(signs) > 1 and signs[-2].touches(signs[-1], per_letter):
            later = signs.pop()
            signs[-1] = signs[-1].join(later)
    for sign in signs:
        sign.draw(ax)


@dataclasses.dataclass(frozen=True)
class _Sign:
    """Glyphs of one event or of several near ones, over the middle of their steps."""

    first: float
    last: float
    colors: dict[str, str]
    """By glyph, in the order of the events."""

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2

    @property
    def glyphs(self) -> list[str]:
        return list(self.colors)[-_MAX_GLYPHS:]

    def draw(self, ax: Axes) -> None:
        """Draw the glyphs with dots between them, as in the key: else they would be read as one glyph."""
        offset_pt = -(sum(map(_measure_glyph_pt, self.glyphs)) + _DOT_PT * (len(self.glyphs) - 1)) / 2
        for k, glyph in enumerate(self.glyphs):
            if k:
                self._write(ax, "·", offset_pt + _DOT_PT / 2, MUTED_COLOR, "between signs")
                offset_pt += _DOT_PT
            half_pt = _measure_glyph_pt(glyph) / 2
            self._write(ax, glyph, offset_pt + half_pt, self.colors[glyph], "sign")
            offset_pt += 2 * half_pt

    def _write(self, ax: Axes, text: str, offset_pt: float, color: str, gid: str) -> None:
        ax.annotate(
            text, (self.middle, 1.0), (offset_pt, _SIGN_PAD_PT), ("data", "axes fraction"), "offset points",
            va="bottom", ha="center", fontsize=8, color=color, annotation_clip=True, gid=gid,
        )  # fmt: skip

    def touches(self, later: _Sign, per_letter: float) -> bool:
        """Return whether a later sign would be drawn over this one."""
        letters = sum(
            len("".join(sign.glyphs)) + _DOT_PT / _LETTER_PT * (len(sign.glyphs) - 1) for sign in (self, later)
        )
        return later.middle - self.middle < per_letter * (letters / 2 + 0.5)

    def join(self, later: _Sign) -> _Sign:
        """Return one sign for this and a later one."""
        return _Sign(self.first, later.last, {**self.colors, **later.colors})


def _measure_glyph_pt(glyph: str) -> float:
    """Return the width of a glyph with the gap beside it; only ``lr`` has two letters, which are narrow."""
    return _GLYPH_PT + _NARROW_LETTER_PT * (len(glyph) - 1)


def _get_width_pt(ax: Axes) -> float:
    """Return the width that axes will have about, in points. They are laid out later."""
    figure, place = ax.get_figure(root=True), ax.get_subplotspec()
    assert figure is not None
    columns = 1 if place is None else place.get_gridspec().ncols / len(place.colspan)
    return _AXES_SHARE * 72 * float(figure.get_figwidth()) / columns

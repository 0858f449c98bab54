"""Pictures of the user's panels for the live view.

The notebook draws them with matplotlib on a thread of their own. An outdated panel is drawn again after two to three
seconds, so that a reader can follow it. One whose drawing takes more than half a second of a core is drawn less often.
One that is out of sight on all pages is not drawn.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting, timeouts
from dtkit._util.guard import run_guarded
from dtkit.dashboard.figures.custom_panels import get_panels, is_wide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.dashboard.figures.custom_panels import PanelFunction
    from dtkit.history.history import History


DEFAULT_WIDTH, DEFAULT_WIDE = 600, 1200
"""Widths of a panel, and of a wide one, in CSS pixels, as long as no page has reported one."""
MAX_DRAWING_SHARE = 0.05
"""Share of a core that drawing a panel takes where that is often enough to be followed."""
MAX_SPARING = 1.5
"""How much longer an interval may get to keep that share."""
MAX_FOLLOWED_SHARE = 0.2
"""Largest share of a core that drawing a panel may take."""


@dataclasses.dataclass(frozen=True)
class PanelPicture:
    """A panel in the live view: a PNG, an error, or a note if this run logged nothing that it reads."""

    name: str
    png: bytes
    error: str | None
    is_wide: bool = False
    note: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The message to pages, next to which the PNG is sent."""
        return {
            "kind": "picture",
            "name": self.name,
            "error": self.error,
            "note": self.note,
            "wide": self.is_wide,
        }


class CustomPanelRenderer:
    """Draws the panels of one history when they are due.

    `is_away` returns whether no page has a title in sight. `cpu_clock` has the seconds of a core that the calling
    thread took. On busy cores a drawing takes several times as long, but no more of a core. Tests replace both clocks.
    """

    def __init__(
        self,
        history: History,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        is_away: Callable[[str], bool] = lambda _title: False,
        get_width: Callable[[str], int | None] = lambda _title: None,
    ) -> None:
        self._history, self._clock, self._cpu_clock, self._is_away = history, clock, cpu_clock, is_away
        self._get_width = get_width
        self._next_draw_times: dict[str, float] = {}
        self._drawn_states: dict[str, tuple[PanelFunction, int, int]] = {}  # (function, number of rows, width)
        self._shown_titles: set[str] = set()
        self._num_resets = 0

    def reset(self) -> None:
        """Draw all panels again, for a page that was opened now."""
        self._num_resets += 1
        self._next_draw_times.clear()
        self._drawn_states.clear()

    def hurry(self) -> None:
        """Let all panels be due, since some have come into sight."""
        self._next_draw_times.clear()

    @property
    def is_outdated(self) -> bool:
        """Whether the history has rows that some picture in sight lacks, or a panel was removed."""
        return bool(self._list_outdated() or self._list_removed())

    @property
    def due_in_s(self) -> float:
        """Seconds until some outdated panel is due; 0 without one."""
        due_times = [self._next_draw_times.get(name, 0.0) for name in self._list_outdated()]
        return max(0.0, min(due_times, default=0.0) - self._clock())

    def _list_outdated(self) -> list[str]:
        return [
            name
            for name, draw in get_panels().items()
            if self._drawn_states.get(name) != self._get_state(name, draw) and not self._is_away(_make_title(name))
        ]

    def _get_state(self, name: str, draw: PanelFunction) -> tuple[PanelFunction, int, int]:
        width = self._get_width(_make_title(name)) or (DEFAULT_WIDE if is_wide(name) else DEFAULT_WIDTH)
        return draw, self._history.num_valid_rows, width

    def _list_removed(self) -> list[str]:
        return sorted(self._shown_titles - {_make_title(name) for name in get_panels()})

    def take_removed(self) -> list[str]:
        """Return the titles of panels that pages still show, but the user has removed or replaced."""
        removed = self._list_removed()
        self._shown_titles.difference_update(removed)
        self._drawn_states = {name: state for name, state in self._drawn_states.items() if name in get_panels()}
        return removed

    def draw_due_panels(self) -> Iterator[PanelPicture]:
        """Draw the panels that are due and outdated."""
        panels = get_panels()
        for name in self._list_outdated():
            started_at, function = self._clock(), panels[name]
            if started_at < self._next_draw_times.get(name, 0.0):
                continue
            state, num_resets = self._get_state(name, function), self._num_resets
            is_first, cpu_s = name not in self._drawn_states, self._cpu_clock()
            self._shown_titles.add(_make_title(name))
            yield self._draw_panel(name, function, state[-1])
            if num_resets != self._num_resets:  # a page that was opened meanwhile may have missed this picture
                continue
            self._drawn_states[name] = state
            cost_s = 0.0 if is_first else self._cpu_clock() - cpu_s  # the first one also imports libraries and fonts
            self._next_draw_times[name] = started_at + _choose_interval(cost_s)

    def _draw_panel(self, name: str, function: PanelFunction, width: int) -> PanelPicture:
        from dtkit.dashboard.figures import panel_frame

        title = _make_title(name)

        def replace_picture(error: Exception) -> PanelPicture:
            note = panel_frame.describe_missing(error)
            return PanelPicture(title, b"", None if note else panel_frame.format_error(error), is_wide(name), note)

        return run_guarded(
            lambda: PanelPicture(title, panel_frame.draw_png(function, self._history, width), None, is_wide(name)),
            replace_picture,
        )


def _make_title(name: str) -> str:
    return formatting.sanitize_text(name, 60)


def _choose_interval(cost_s: float) -> float:
    """Return the seconds from one drawing to the next, for one that takes `cost_s` of a core."""
    sparing_s = min(cost_s / MAX_DRAWING_SHARE, MAX_SPARING * timeouts.PICTURE_INTERVAL_S)
    return max(timeouts.PICTURE_INTERVAL_S, sparing_s, cost_s / MAX_FOLLOWED_SHARE)

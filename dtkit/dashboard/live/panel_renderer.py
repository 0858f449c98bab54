"""Pictures of the user's panels for the live view.

The notebook draws them with matplotlib on a thread of their own. An outdated panel is drawn again after two to three
seconds, so that a reader can follow it. One whose drawing takes more than half a second of a core is drawn less often.
One that is out of sight on all pages is not drawn.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from dtkit._util import formatting, timeouts
from dtkit._util.guard import run_guarded
from dtkit.dashboard.figures.custom_panels import get_panels, is_wide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.dashboard.figures.custom_panels import PanelFunction
    from dtkit.history.history import History


MAX_DRAWING_SHARE = 0.05
"""Share of a core that drawing a panel takes where that is often enough to be followed."""
MAX_SPARING = 1.5
"""How much longer an interval may get to keep that share."""
MAX_FOLLOWED_SHARE = 0.2
"""Largest share of a core that drawing a panel may take."""


@dataclasses.dataclass(frozen=True)
class PanelPicture:
    """A panel in the live view: a PNG, or an error."""

    name: str
    png: bytes
    error: str | None
    is_wide: bool = False


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
    ) -> None:
        self._history, self._clock, self._cpu_clock, self._is_away = history, clock, cpu_clock, is_away
        self._next_draw_times: dict[str, float] = {}
        self._drawn_states: dict[str, tuple[PanelFunction, int]] = {}  # (function, number of rows)

    def reset(self) -> None:
        """Draw all panels again, for a page that was opened now."""
        self._next_draw_times.clear()
        self._drawn_states.clear()

    def hurry(self) -> None:
        """Let all panels be due, since some have come into sight."""
        self._next_draw_times.clear()

    @property
    def is_outdated(self) -> bool:
        """Whether the history has rows that some picture in sight lacks."""
        return bool(self._list_outdated())

    @property
    def due_in_s(self) -> float:
        """Seconds until some outdated panel is due; 0 without one."""
        due_times = [self._next_draw_times.get(name, 0.0) for name in self._list_outdated()]
        return max(0.0, min(due_times, default=0.0) - self._clock())

    def _list_outdated(self) -> list[str]:
        num_rows = self._history.num_valid_rows
        return [
            name
            for name, draw in get_panels().items()
            if self._drawn_states.get(name) != (draw, num_rows) and not self._is_away(_make_title(name))
        ]

    def draw_due_panels(self) -> Iterator[PanelPicture]:
        """Draw the panels that are due and outdated."""
        panels = get_panels()
        for name in self._list_outdated():
            started_at, function = self._clock(), panels[name]
            if started_at < self._next_draw_times.get(name, 0.0):
                continue
            state = function, self._history.num_valid_rows
            is_first, cpu_s = name not in self._drawn_states, self._cpu_clock()
            yield self._draw_panel(name, function)
            self._drawn_states[name] = state
            cost_s = 0.0 if is_first else self._cpu_clock() - cpu_s  # the first one also imports libraries and fonts
            self._next_draw_times[name] = started_at + _choose_interval(cost_s)

    def _draw_panel(self, name: str, function: PanelFunction) -> PanelPicture:
        from dtkit.dashboard.figures import panel_frame

        title = _make_title(name)
        return run_guarded(
            lambda: PanelPicture(title, panel_frame.draw_png(function, self._history), None, is_wide(name)),
            lambda error: PanelPicture(title, b"", panel_frame.format_error(error), is_wide(name)),
        )


def _make_title(name: str) -> str:
    return formatting.sanitize_text(name, 60)


def _choose_interval(cost_s: float) -> float:
    """Return the seconds from one drawing to the next, for one that takes `cost_s` of a core."""
    sparing_s = min(cost_s / MAX_DRAWING_SHARE, MAX_SPARING * timeouts.PICTURE_INTERVAL_S)
    return max(timeouts.PICTURE_INTERVAL_S, sparing_s, cost_s / MAX_FOLLOWED_SHARE)

"""Pictures of the user's panels for the live view.

The notebook draws them with matplotlib on a thread of their own. A panel is drawn every two seconds at most, and
drawing takes a twentieth of the time at most.
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
"""Largest share of the time that drawing may take."""


@dataclasses.dataclass(frozen=True)
class PanelPicture:
    """A panel in the live view: a PNG, or an error."""

    name: str
    png: bytes
    error: str | None
    is_wide: bool = False


class CustomPanelRenderer:
    """Draws the panels of one history when they are due."""

    def __init__(self, history: History, clock: Callable[[], float] = time.monotonic) -> None:
        self._history, self._clock = history, clock
        self._next_draw_times: dict[str, float] = {}
        self._drawn_states: dict[str, tuple[PanelFunction, int]] = {}  # (function, number of rows)

    def reset(self) -> None:
        """Draw all panels again, for a page that was opened now."""
        self._next_draw_times.clear()
        self._drawn_states.clear()

    @property
    def is_outdated(self) -> bool:
        """Whether the history has rows that some picture lacks."""
        num_rows = len(self._history)
        return any(self._drawn_states.get(name) != (function, num_rows) for name, function in get_panels().items())

    def draw_due_panels(self) -> Iterator[PanelPicture]:
        """Draw the panels that are due and outdated."""
        for name, function in get_panels().items():
            started_at, state = self._clock(), (function, len(self._history))
            if started_at < self._next_draw_times.get(name, 0.0) or self._drawn_states.get(name) == state:
                continue
            yield self._draw_panel(name, function)
            self._drawn_states[name] = state
            drawing_s = self._clock() - started_at
            self._next_draw_times[name] = self._clock() + max(
                timeouts.PICTURE_INTERVAL_S, drawing_s / MAX_DRAWING_SHARE
            )

    def _draw_panel(self, name: str, function: PanelFunction) -> PanelPicture:
        from dtkit.dashboard.figures import panel_frame

        title = formatting.sanitize_text(name, 60)
        return run_guarded(
            lambda: PanelPicture(title, panel_frame.draw_png(function, self._history), None, is_wide(name)),
            lambda error: PanelPicture(title, b"", panel_frame.format_error(error), is_wide(name)),
        )

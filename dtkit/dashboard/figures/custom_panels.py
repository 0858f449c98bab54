"""A user's own panels: ``@dtkit.panel("name")`` above a function that draws on an ``Axes`` from a ``History``.

    @dtkit.panel("Loss per epoch")
    def draw(ax, history):
        ax.plot(*history.loss())

They stand in the kept picture like dtkit's own, and in the live view as a picture that is drawn in the kernel by
matplotlib: on a thread of its own, at most every two seconds, and so that drawing takes at most a twentieth of the
time. An error in a panel is shown in that panel and nowhere else.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit._util.guard import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes

    from dtkit.history.history import History

    PanelFunction = Callable[[Axes, History], Any]

MIN_PICTURE_INTERVAL_S = 2.0
"""Seconds between two pictures of the live view, at least."""

MAX_DRAWING_SHARE = 0.05
"""Of the time, what drawing may take."""

_registered_panels: dict[str, PanelFunction] = {}


def panel(name: str) -> Callable[[PanelFunction], PanelFunction]:
    """Add a panel to every run's dashboard: a decorator of a function ``draw(ax, history)``.

    `name` is its title; a panel of the same name is replaced, so that a cell may be run again. ``remove_panel(name)``
    in this module takes it away.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'panel({name!r}): give it a title, as in @dtkit.panel("Accuracy")')

    def keep(draw: PanelFunction) -> PanelFunction:
        if not callable(draw):
            raise TypeError(f"{draw!r} is no function; a panel is a function of (ax, history)")
        _registered_panels[name] = draw
        return draw

    return keep


def remove_panel(name: str) -> None:
    """Take a panel away; nothing happens where there is none."""
    _registered_panels.pop(name, None)


def get_panels() -> dict[str, PanelFunction]:
    """The panels by name, in the order in which they were added."""
    return dict(_registered_panels)


def wrap_panel(name: str, function: PanelFunction) -> PanelFunction:
    """A panel for the kept picture: with its title, and with its error in its place."""

    def whole(ax: Axes, history: History) -> None:
        from dtkit.dashboard.figures import style

        def fail(error: Exception) -> None:
            ax.clear()
            ax.set_axis_off()
            style.show_placeholder(ax, f"this panel failed: {_format_error(error)}")

        style.style_axes(ax)
        run_guarded(lambda: function(ax, history), fail)
        style.set_title(ax, formatting.sanitize_text(name, 60))

    return whole


@dataclasses.dataclass(frozen=True)
class PanelPicture:
    """A panel as the live view shows it: a PNG, or what went wrong."""

    name: str
    png: bytes
    error: str | None


class CustomPanelRenderer:
    """Draws the panels of one history for the live view, no more often than they may be."""

    def __init__(self, history: History, clock: Callable[[], float] = time.monotonic) -> None:
        self._history, self._clock = history, clock
        self._next_draw_times: dict[str, float] = {}
        self._drawn_states: dict[str, tuple[PanelFunction, int]] = {}  # by which function, and from how many rows

    def reset(self) -> None:
        """A page was opened that has seen nothing: every picture is new to it."""
        self._next_draw_times.clear()
        self._drawn_states.clear()

    @property
    def is_outdated(self) -> bool:
        """Whether there is a panel whose picture is not of now."""
        rows = len(self._history)
        return any(self._drawn_states.get(name) != (function, rows) for name, function in get_panels().items())

    def draw_due_panels(self) -> Iterator[PanelPicture]:
        """The pictures that are due and have something new."""
        for name, function in get_panels().items():
            now, state = self._clock(), (function, len(self._history))
            if now < self._next_draw_times.get(name, 0.0) or self._drawn_states.get(name) == state:
                continue
            yield self._draw_panel(name, function)
            self._drawn_states[name] = state
            self._next_draw_times[name] = self._clock() + max(
                MIN_PICTURE_INTERVAL_S, (self._clock() - now) / MAX_DRAWING_SHARE
            )

    def _draw_panel(self, name: str, function: PanelFunction) -> PanelPicture:
        title = formatting.sanitize_text(name, 60)
        return run_guarded(
            lambda: PanelPicture(title, _draw_png(function, self._history), None),
            lambda error: PanelPicture(title, b"", _format_error(error)),
        )


def _draw_png(function: PanelFunction, history: History) -> bytes:
    """A panel of its own, 6 by 2.3 inches at twice the density of a screen."""
    from dtkit.dashboard.figures import run_figure, style

    figure = run_figure.create_figure(6.0, 2.3)
    ax = figure.subplots()
    style.style_axes(ax)
    function(ax, history)
    return run_figure.render_png(figure)


def _format_error(error: Exception) -> str:
    return formatting.sanitize_text(f"{type(error).__name__}: {error}", 200)

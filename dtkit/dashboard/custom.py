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
from dtkit._util.guard import attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes

    from dtkit.history.history import History

    Draw = Callable[[Axes, History], Any]

LEAST_S = 2.0
"""Seconds between two pictures of the live view, at least."""

SHARE = 0.05
"""Of the time, what drawing may take."""

_panels: dict[str, Draw] = {}


def panel(name: str) -> Callable[[Draw], Draw]:
    """Add a panel to every run's dashboard: a decorator of a function ``draw(ax, history)``.

    `name` is its title; a panel of the same name is replaced, so that a cell may be run again. ``remove_panel(name)``
    in this module takes it away.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'panel({name!r}): give it a title, as in @dtkit.panel("Accuracy")')

    def keep(draw: Draw) -> Draw:
        if not callable(draw):
            raise TypeError(f"{draw!r} is no function; a panel is a function of (ax, history)")
        _panels[name] = draw
        return draw

    return keep


def remove_panel(name: str) -> None:
    """Take a panel away; nothing happens where there is none."""
    _panels.pop(name, None)


def panels() -> dict[str, Draw]:
    """The panels by name, in the order in which they were added."""
    return dict(_panels)


def titled(name: str, draw: Draw) -> Draw:
    """A panel for the kept picture: with its title, and with its error in its place."""

    def whole(ax: Axes, history: History) -> None:
        from dtkit.dashboard import axes

        def fail(error: Exception) -> None:
            ax.clear()
            ax.set_axis_off()
            axes.nothing(ax, f"this panel failed: {_said(error)}")

        axes.tidy(ax)
        attempt(lambda: draw(ax, history), fail)
        axes.title(ax, formatting.plain(name, 60))

    return whole


@dataclasses.dataclass(frozen=True)
class Picture:
    """A panel as the live view shows it: a PNG, or what went wrong."""

    name: str
    png: bytes
    error: str | None


class Gallery:
    """Draws the panels of one history for the live view, no more often than they may be."""

    def __init__(self, history: History, clock: Callable[[], float] = time.monotonic) -> None:
        self._history, self._clock = history, clock
        self._due: dict[str, float] = {}
        self._drawn: dict[str, tuple[Draw, int]] = {}  # by which function, and from how many rows

    def forget(self) -> None:
        """A page was opened that has seen nothing: every picture is new to it."""
        self._due.clear()
        self._drawn.clear()

    @property
    def pending(self) -> bool:
        """Whether there is a panel whose picture is not of now."""
        rows = len(self._history)
        return any(self._drawn.get(name) != (function, rows) for name, function in panels().items())

    def draw(self) -> Iterator[Picture]:
        """The pictures that are due and have something new."""
        for name, function in panels().items():
            now, state = self._clock(), (function, len(self._history))
            if now < self._due.get(name, 0.0) or self._drawn.get(name) == state:
                continue
            yield self._picture(name, function)
            self._drawn[name] = state
            self._due[name] = self._clock() + max(LEAST_S, (self._clock() - now) / SHARE)

    def _picture(self, name: str, function: Draw) -> Picture:
        title = formatting.plain(name, 60)
        return attempt(
            lambda: Picture(title, _png(function, self._history), None),
            lambda error: Picture(title, b"", _said(error)),
        )


def _png(function: Draw, history: History) -> bytes:
    """A panel of its own, 6 by 2.3 inches at twice the density of a screen."""
    from dtkit.dashboard import axes, figures

    figure = figures.new_figure(6.0, 2.3)
    ax = figure.subplots()
    axes.tidy(ax)
    function(ax, history)
    return figures.png(figure)


def _said(error: Exception) -> str:
    return formatting.plain(f"{type(error).__name__}: {error}", 200)

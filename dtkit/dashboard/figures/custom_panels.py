"""The user's own panels: ``@dtkit.panel("name")`` on a function that draws on an ``Axes`` from a ``History``.

    @dtkit.panel("Loss per epoch")
    def draw(ax, history):
        ax.plot(*history.loss())

The figure of a run has them next to dtkit's panels. The live view shows them as pictures that the notebook draws.
An error in a panel is shown in that panel only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit._util.arguments import suggest_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    from dtkit.history.history import History

    PanelFunction = Callable[[Axes, History], Any]

_registered_panels: dict[str, PanelFunction] = {}
_wide_panels: set[str] = set()


@suggest_arguments
def panel(name: str, *, wide: bool = False) -> Callable[[PanelFunction], PanelFunction]:
    """Add a panel to the dashboard of every run: a decorator of a function ``draw(ax, history)``.

    `ax` is a matplotlib Axes, and `history` the run's :class:`~dtkit.History`::

        @dtkit.panel("Loss of rank 0")
        def draw(ax, history):
            ax.plot(*history.loss(rank=0))

    `name` is its title. A `wide` panel takes the full width. A panel of the same name is replaced, so that a cell may
    run again. To remove a panel, call ``remove_panel(name)`` of this module.
    """
    if not isinstance(wide, bool):
        raise TypeError(f"panel({name!r}, wide={wide!r}): it is True for the full width, or False")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'panel({name!r}): give it a title, as in @dtkit.panel("Accuracy")')

    def register(draw: PanelFunction) -> PanelFunction:
        if not callable(draw):
            raise TypeError(f"{draw!r} is not a function; a panel is a function of (ax, history)")
        _registered_panels[name] = draw
        (_wide_panels.add if wide else _wide_panels.discard)(name)
        return draw

    return register


def remove_panel(name: str) -> None:
    """Remove a panel. Does nothing if there is none of this name."""
    _registered_panels.pop(name, None)
    _wide_panels.discard(name)


def get_panels() -> dict[str, PanelFunction]:
    """Return the panels by name, in the order in which they were added."""
    return dict(_registered_panels)


def is_wide(name: str) -> bool:
    """Return whether a panel takes the full width."""
    return name in _wide_panels

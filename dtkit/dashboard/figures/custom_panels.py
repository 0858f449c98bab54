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
from dtkit._util.guard import Subscribers
from dtkit._util.notebook import find_running_cell

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    from dtkit.history.history import History

    PanelFunction = Callable[[Axes, History], Any]

_registered_panels: dict[str, PanelFunction] = {}
_wide_panels: set[str] = set()
_cells: dict[str, tuple[str, str]] = {}
"""The cell that added a panel, and its execution."""
_subscribers = Subscribers()


@suggest_arguments
def panel(name: str, *, wide: bool = False) -> Callable[[PanelFunction], PanelFunction]:
    """Add a panel to the dashboard of every run: a decorator of a function ``draw(ax, history)``.

    `ax` is a matplotlib Axes, and `history` the run's :class:`~dtkit.History`::

        @dtkit.panel("Loss of rank 0")
        def draw(ax, history):
            ax.plot(*history.loss(rank=0))

    `name` is its title. A `wide` panel takes the full width. A panel replaces that of the same name. A cell that runs
    again replaces the panels that it added before, also under other names. To remove a panel, call
    ``remove_panel(name)`` of this module.

    In a run that logged nothing under a name that the panel reads, it says so, and reports leave it out.

    The panel is a picture, so smoothing, scales and axes of the charts don't apply to it. Numbers that you report with
    :func:`dtkit.log` get charts to which they do.
    """
    if not isinstance(wide, bool):
        raise TypeError(f"panel({name!r}, wide={wide!r}): it is True for the full width, or False")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'panel({name!r}): give it a title, as in @dtkit.panel("Accuracy")')

    def register(draw: PanelFunction) -> PanelFunction:
        if not callable(draw):
            raise TypeError(f"{draw!r} is not a function; a panel is a function of (ax, history)")
        is_of_cell = getattr(draw, "__module__", "") == "__main__"  # a module runs once, in the cell that imports it
        _forget_earlier_execution(find_running_cell() if is_of_cell else None, name)
        _registered_panels[name] = draw
        (_wide_panels.add if wide else _wide_panels.discard)(name)
        _subscribers.notify("the panels")
        return draw

    return register


def _forget_earlier_execution(cell: tuple[str, str] | None, name: str) -> None:
    """Remove what the cell added when it ran before, and note that it adds this panel now."""
    earlier = [n for n, known in _cells.items() if cell and known[0] == cell[0] and known[1] != cell[1]]
    for other in earlier:
        _drop(other)
    _cells.pop(name, None)
    if cell is not None:
        _cells[name] = cell


def _drop(name: str) -> None:
    _registered_panels.pop(name, None)
    _cells.pop(name, None)
    _wide_panels.discard(name)


def remove_panel(name: str) -> None:
    """Remove a panel, also from dashboards that show it. Does nothing if there is none of this name."""
    _drop(name)
    _subscribers.notify("the panels")


def subscribe(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` after every change of the panels. Return the function that ends this."""
    return _subscribers.add(callback)


def get_panels() -> dict[str, PanelFunction]:
    """Return the panels by name, in the order in which they were added."""
    return dict(_registered_panels)


def is_wide(name: str) -> bool:
    """Return whether a panel takes the full width."""
    return name in _wide_panels

"""Use of the machines: CPU, network, memory and GPU of each node over the steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dtkit.dashboard.figures.panels import scalars

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    from dtkit.history.history import History

_MAX_PANELS = 6


def make_panels(history: History) -> list[Callable[[Axes, History], None]]:
    """Return the panels of the numbers that engines report of themselves."""
    names = [name for name in history.system_names if scalars.has_numbers(history, name)]
    return [functools.partial(scalars.draw, name=name) for name in names[:_MAX_PANELS]]

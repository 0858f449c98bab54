"""Lines of single nodes among many: of the outliers, and of the node that somebody selected.

Above ``MAX_LINES`` nodes a chart has a band. To show any node's own past at once, the curves of all of them are kept
here, coarsely (2 MB for 256 nodes), and the few that are looked at are sent: all of a line when the choice changes, and
else what changed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.dashboard.glance import glance
from dtkit.dashboard.outliers import outliers
from dtkit.dashboard.series import LOSS, MAX_LINES, THROUGHPUT, Curves

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from matplotlib.axes import Axes

    from dtkit.dashboard.series import Chart
    from dtkit.history.history import History

POINTS = 128
CHARTS = (LOSS, THROUGHPUT)


@dataclasses.dataclass(frozen=True)
class Lines:
    """Buckets from `first` on of the lines of `ranks`; `means` is float32 of shape (buckets, charts, ranks)."""

    ranks: tuple[int, ...]
    width: int
    origin: int
    first: int
    means: np.ndarray


class Spotlight:
    """The lines of chosen nodes of a growing history."""

    def __init__(self, ranks: int) -> None:
        self._curves = Curves(CHARTS, ranks, POINTS, lines=ranks)
        self._sent: tuple[tuple[int, ...], int] = (), 0

    def update(self, history: History) -> None:
        """Read what the history gained since the last time."""
        self._curves.update(history)

    def take(self, ranks: Sequence[int], *, whole: bool = False) -> Lines | None:
        """What changed of these nodes' lines; all of them where the choice is new, or if asked; None if nothing did."""
        choice = tuple(ranks), self._curves.width
        whole, self._sent = whole or choice != self._sent, choice
        if not whole and (not ranks or not self._curves.pending):
            return None
        columns = [layout.first + rank for layout in self._curves.layouts for rank in ranks]
        part = self._curves.take_all(columns) if whole else self._curves.take(columns=columns)
        means = part.values[..., 1].reshape(len(part.values), len(CHARTS), len(ranks))
        return Lines(tuple(ranks), part.width, part.origin, part.first, means)


def draw_outliers(ax: Axes, history: History, chart: Chart, ranks: int, budget: int) -> None:
    """The kept picture's half: the outliers' lines over the band of a chart; nothing for few nodes."""
    from dtkit.dashboard import axes

    if ranks <= MAX_LINES:
        return
    now = glance(history, ranks)
    chosen = outliers(now, now.lost)
    if chosen:
        curves = Curves((chart,), ranks, budget, lines=ranks)
        curves.update(history)
        axes.draw_outliers(ax, curves.part(chosen), chosen, now.lost)

"""Lines of single nodes among many: of the outliers, and of the node that somebody selected.

Above ``MAX_NODE_LINES`` nodes a chart has a band. To show any node's own past at once, the curves of all of them are kept
here, coarsely (2 MB for 256 nodes), and the few that are looked at are sent: all of a line when the choice changes, and
else what changed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.dashboard.summary.curves import LOSS, MAX_NODE_LINES, THROUGHPUT, Curves
from dtkit.dashboard.summary.metrics import compute_run_metrics
from dtkit.dashboard.summary.outliers import find_outliers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from matplotlib.axes import Axes

    from dtkit.dashboard.summary.curves import Chart
    from dtkit.history.history import History

NUM_BUCKETS = 128
NODE_CHARTS = (LOSS, THROUGHPUT)


@dataclasses.dataclass(frozen=True)
class NodeLines:
    """Buckets from `first` on of the lines of `ranks`; `means` is float32 of shape (buckets, charts, ranks)."""

    ranks: tuple[int, ...]
    width: int
    origin: int
    first: int
    means: np.ndarray


class NodeSeries:
    """The lines of chosen nodes of a growing history."""

    def __init__(self, num_ranks: int) -> None:
        self._curves = Curves(NODE_CHARTS, num_ranks, NUM_BUCKETS, max_lines=num_ranks)
        self._sent_choice: tuple[tuple[int, ...], int] = (), 0

    def update(self, history: History) -> None:
        """Read what the history gained since the last time."""
        self._curves.update(history)

    def take_changes(self, ranks: Sequence[int], *, full: bool = False) -> NodeLines | None:
        """What changed of these nodes' lines; all of them where the choice is new, or if asked; None if nothing did."""
        choice = tuple(ranks), self._curves.width
        full, self._sent_choice = full or choice != self._sent_choice, choice
        if not full and (not ranks or not self._curves.has_changes):
            return None
        columns = [layout.first + rank for layout in self._curves.chart_layouts for rank in ranks]
        part = self._curves.take_all(columns) if full else self._curves.take_changes(columns=columns)
        means = part.values[..., 1].reshape(len(part.values), len(NODE_CHARTS), len(ranks))
        return NodeLines(tuple(ranks), part.width, part.origin, part.first, means)


def draw_history_outliers(ax: Axes, history: History, chart: Chart, num_ranks: int, max_buckets: int) -> None:
    """The kept picture's half: the outliers' lines over the band of a chart; nothing for few nodes."""
    from dtkit.dashboard.figures import style

    if num_ranks <= MAX_NODE_LINES:
        return
    now = compute_run_metrics(history, num_ranks)
    chosen = find_outliers(now, now.lost_nodes)
    if chosen:
        curves = Curves((chart,), num_ranks, max_buckets, max_lines=num_ranks)
        curves.update(history)
        style.draw_outlier_lines(ax, curves.get_all(chosen), chosen, now.lost_nodes)

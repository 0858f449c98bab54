"""Lines of single nodes among many: of the outliers, and of the selected node.

Above ``MAX_NODE_LINES`` nodes a chart has a band. Coarse curves of all nodes are kept here. So a page can show the past
of any node at once. Only chosen nodes are sent: whole lines when the choice changes, and otherwise the changes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.dashboard.summary.curves import LOSS, THROUGHPUT, Curves

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from dtkit.history.history import History

NUM_BUCKETS = 128
NODE_CHARTS = (LOSS, THROUGHPUT)


@dataclasses.dataclass(frozen=True)
class NodeLines:
    """Buckets of the lines of `ranks`, from `first` on; `means` is float32 of shape (buckets, charts, ranks)."""

    ranks: tuple[int, ...]
    width: int
    origin: int
    first: int
    means: np.ndarray


class NodeSeries:
    """Lines of chosen nodes of a growing history."""

    def __init__(self, num_ranks: int) -> None:
        self._curves = Curves(NODE_CHARTS, num_ranks, NUM_BUCKETS, max_lines=num_ranks)
        self._sent_choice: tuple[tuple[int, ...], int] = (), 0

    def update(self, history: History) -> None:
        """Read the new rows of the history."""
        self._curves.update(history)

    def take_changes(self, ranks: Sequence[int], *, full: bool = False) -> NodeLines | None:
        """Return the changes of these nodes' lines, or None. A new choice, or `full`, returns whole lines."""
        choice = tuple(ranks), self._curves.width
        full, self._sent_choice = full or choice != self._sent_choice, choice
        if not full and (not ranks or not self._curves.has_changes):
            return None
        columns = [layout.first + rank for layout in self._curves.chart_layouts for rank in ranks]
        part = self._curves.take_all(columns) if full else self._curves.take_changes(columns=columns)
        means = part.values[..., 1].reshape(len(part.values), len(NODE_CHARTS), len(ranks))
        return NodeLines(tuple(ranks), part.width, part.origin, part.first, means)

"""The one down-sampling of all views: curves in a fixed number of buckets that keep every extreme.

The step axis is cut into buckets of `width` steps. A bucket holds, for each line of each chart, the
smallest, the largest and the mean of the values that fell into it. When the steps outgrow the budget,
neighbouring buckets are joined and the width doubles; so 100,000 steps cost what 500 cost, a spike of one
step never disappears, and the mean of a bucket is a line that can be read where the values alone would be a
thick band.

Up to ``MAX_NODE_LINES`` ranks have a line each; more share one, whose smallest and largest are then the band
over all nodes. The last line of a chart is the value over all ranks. Charts of what is the same on every rank
(the learning rate, the reduced gradient's norm) have that line alone. The lines of all charts stand side by
side, as the columns of one table (:class:`ChartLayout`).

Joining needs nothing but the buckets themselves. A page that holds a copy joins its own when told a new
width, and is sent only the buckets that changed (:meth:`Curves.take`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.history.history import History

MAX_BUCKETS = 512
"""Buckets at most: about one a pixel of a chart. A power of two, so that halving stays even."""

MAX_NODE_LINES = 8
"""Ranks that are told apart by a line of their own; above, a band."""


_MAX_DRAWABLE = 1e37  # float32 ends at 3e38, and charts need room to subtract


@dataclasses.dataclass(frozen=True)
class Chart:
    """One quantity over the steps: how to read it from rows (``ROW``), and from totals (``TOTAL_DTYPE``) and `copies`.

    `copies` is how many ranks share one replica of the model (:attr:`~dtkit.History.copies`).
    Without `from_rows` there are no lines for nodes; without `from_totals` any rank's rows say it for all.
    """

    name: str
    from_rows: Callable[[np.ndarray], np.ndarray] | None
    from_totals: Callable[[np.ndarray, int], np.ndarray] | None


@dataclasses.dataclass(frozen=True)
class ChartLayout:
    """Where a chart's lines stand in the table of curves: `nodes` columns from `first` on, then the one over all."""

    name: str
    first: int
    nodes: int
    banded: bool

    @property
    def overall_column(self) -> int:
        """The column of the line over all ranks."""
        return self.first + self.nodes


def compute_own_throughput(rows: np.ndarray) -> np.ndarray:
    """Samples per second of a rank while it does not wait for others: nodes in step differ in nothing else."""
    busy = rows["step_s"] - rows["wait_s"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(busy > 0, rows["samples"] / busy, np.nan))


def find_rows_without_loss(rows: np.ndarray) -> np.ndarray:
    """Which rows are of a rank that has no loss to tell: it had no sample, or a stage that is not a pipeline's last.

    A loss that has become NaN is another matter: it has a weight.
    """
    return np.asarray(np.isnan(rows["loss"]) & (rows["weight"] == 0))


def count_replicas(num_ranks: int, ranks_per_replica: int) -> int:
    """How many parts each batch is cut into, where `copies` ranks share one replica of the model."""
    return max(1, num_ranks // ranks_per_replica)


def format_overall_label(num_ranks: int, ranks_per_replica: int, num_initial_ranks: int | None = None) -> str:
    """The name of throughput's line over all nodes: ``all ÷ 4``, and ``all`` where all take the same samples.

    A run that began with more nodes than there are now was divided by other numbers before: ``all ÷ n``.
    """
    count = count_replicas(num_ranks, ranks_per_replica)
    if num_initial_ranks is not None and count != count_replicas(num_initial_ranks, ranks_per_replica):
        return "all ÷ n"
    return f"all ÷ {count}" if count > 1 else "all"


def _compute_mean_throughput(totals: np.ndarray, ranks_per_replica: int) -> np.ndarray:
    # All together, divided by the replicas: on the scale of the nodes' own lines, equal when none waits.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(totals["samples"] / totals["step_s"] / np.maximum(1, totals["ranks"] // ranks_per_replica))


LOSS = Chart("loss", lambda rows: rows["loss"], lambda totals, _copies: totals["loss"])
THROUGHPUT = Chart("throughput", compute_own_throughput, _compute_mean_throughput)
LR = Chart("lr", lambda rows: rows["lr"], None)
GRAD_NORM = Chart("grad_norm", None, lambda totals, _copies: totals["grad_norm"])
CHARTS = (LOSS, THROUGHPUT, LR, GRAD_NORM)


def make_chart_layouts(charts: Sequence[Chart], num_ranks: int, max_lines: int = MAX_NODE_LINES) -> list[ChartLayout]:
    """The columns of each chart; up to `lines` ranks have one each."""
    found, first = [], 0
    banded = num_ranks > max_lines
    for chart in charts:
        both = chart.from_rows is not None and chart.from_totals is not None
        nodes = (1 if banded else num_ranks) if both else 0
        found.append(ChartLayout(chart.name, first, nodes, banded and both))
        first += nodes + 1
    return found


@dataclasses.dataclass(frozen=True)
class CurveBuckets:
    """Buckets `first` to `first + len(values)` of some curves.

    `values` is float32 of shape (buckets, columns, 3): smallest, mean, largest; NaN where nothing is.
    """

    width: int
    origin: int
    first: int
    values: np.ndarray

    @property
    def is_flat(self) -> bool:
        """Whether smallest, mean and largest are the same everywhere, so that one of them says all."""
        low, high = self.values[..., 0], self.values[..., 2]
        return bool(np.array_equal(low, high, equal_nan=True))

    @property
    def middle_steps(self) -> np.ndarray:
        """The step in the middle of each bucket."""
        middle = (self.width - 1) / 2
        return self.origin + middle + self.width * np.arange(self.first, self.first + len(self.values))


class Curves:
    """The curves of a growing history, for `ranks` ranks, in at most `budget` buckets.

    More than `lines` ranks share a band.
    """

    def __init__(
        self, charts: Sequence[Chart], num_ranks: int, max_buckets: int = MAX_BUCKETS, max_lines: int = MAX_NODE_LINES
    ) -> None:
        self._charts, self._num_ranks = tuple(charts), num_ranks
        self.chart_layouts = make_chart_layouts(charts, num_ranks, max_lines)
        self.num_columns = self.chart_layouts[-1].overall_column + 1
        shape = (max_buckets, self.num_columns)
        self._low = np.full(shape, np.inf)
        self._high = np.full(shape, -np.inf)
        self._sum = np.zeros(shape)
        self._count = np.zeros(shape, "i8")
        self._max_buckets, self._width, self._num_buckets = max_buckets, 1, 0
        self._origin: int | None = None
        self._num_rows_read = self._num_totals_read = 0
        self._first_changed = 0  # buckets from here on have not been taken

    @property
    def width(self) -> int:
        """Steps in a bucket."""
        return self._width

    @property
    def has_changes(self) -> bool:
        """Whether buckets changed that were not taken."""
        return self._first_changed < self._num_buckets

    def update(self, history: History) -> None:
        """Read what the history gained since the last time."""
        rows = history.rows(self._num_rows_read)
        totals = history.totals(self._num_totals_read)
        self._num_rows_read += len(rows)
        self._num_totals_read += len(totals)
        steps = np.concatenate([rows["step"], totals["step"]])
        if not len(steps):
            return
        self._extend_to(int(steps.min()), int(steps.max()))
        rows = rows[rows["rank"] < self._num_ranks]
        for chart, layout in zip(self._charts, self.chart_layouts, strict=True):
            if chart.from_totals is not None:
                values = chart.from_totals(totals, history.ranks_per_replica)
                self._add_values(np.full(len(totals), layout.overall_column), totals["step"], values)
            if chart.from_rows is not None and len(rows):
                # What is the same on every rank is read from one of them.
                own = rows if chart.from_totals is not None else rows[rows["rank"] == rows["rank"].min()]
                line = own["rank"].astype("i8") if layout.nodes > 1 else np.zeros(len(own), "i8")
                self._add_values(layout.first + line, own["step"], chart.from_rows(own))

    def widen(self, width: int) -> None:
        """Join buckets until they are `width` steps wide, a power of two; wider ones stay."""
        while self._width < width:
            self._merge_neighbors()

    def take_changes(self, max_buckets: int | None = None, columns: Sequence[int] | None = None) -> CurveBuckets:
        """The buckets that changed since they were last taken, the oldest `limit` of them; of some columns, or all."""
        stop = self._num_buckets if max_buckets is None else min(self._num_buckets, self._first_changed + max_buckets)
        first, self._first_changed = self._first_changed, max(stop, self._first_changed)
        return self._get_buckets(first, stop, columns)

    def take_all(self, columns: Sequence[int] | None = None) -> CurveBuckets:
        """Every bucket; none counts as changed after it."""
        self._first_changed = self._num_buckets
        return self.get_all(columns)

    def get_all(self, columns: Sequence[int] | None = None) -> CurveBuckets:
        """Every bucket, without touching what counts as changed."""
        return self._get_buckets(0, self._num_buckets, columns)

    def _get_buckets(self, first: int, stop: int, columns: Sequence[int] | None) -> CurveBuckets:
        here: Any = slice(first, stop)
        if columns is not None:
            here = np.ix_(range(first, stop), columns)
        count = self._count[here]
        seen = count > 0
        values = np.full((*count.shape, 3), np.nan, "f4")
        values[seen, 0] = self._low[here][seen]
        values[seen, 1] = self._sum[here][seen] / count[seen]
        values[seen, 2] = self._high[here][seen]
        return CurveBuckets(self._width, self._origin or 0, first, values)

    def _extend_to(self, first_step: int, last_step: int) -> None:
        """Widen the buckets until `highest` falls into the budget, and note what is about to change."""
        if self._origin is None:
            self._origin = first_step
        while (last_step - self._origin) // self._width >= self._max_buckets:
            self._merge_neighbors()
        first = max(0, first_step - self._origin) // self._width
        self._first_changed = min(self._first_changed, first)
        self._num_buckets = max(self._num_buckets, (last_step - self._origin) // self._width + 1)

    def _merge_neighbors(self) -> None:
        """Join neighbouring buckets. The last one may have been half full, so it counts as changed."""
        half, last = self._max_buckets // 2, max(0, self._num_buckets - 1) // 2
        count = self._count[0::2] + self._count[1::2]
        exact = self._sum[0::2] + self._sum[1::2]
        # A page knows means and not counts, so the mean of a pair is the mean of its two, here as there. It
        # is another than the exact one only where a NaN left a bucket short, and in the last: sent again.
        means = [self._sum[k::2] / np.maximum(self._count[k::2], 1) for k in (0, 1)]
        both = (self._count[0::2] > 0) & (self._count[1::2] > 0)
        both[last] = False
        self._sum[:half] = np.where(both, (means[0] + means[1]) / 2 * count, exact)
        self._low[:half] = np.minimum(self._low[0::2], self._low[1::2])
        self._high[:half] = np.maximum(self._high[0::2], self._high[1::2])
        self._count[:half] = count
        self._low[half:], self._high[half:], self._sum[half:], self._count[half:] = np.inf, -np.inf, 0, 0
        self._width *= 2
        self._first_changed = min(self._first_changed // 2, last)
        self._num_buckets = (self._num_buckets + 1) // 2

    def _add_values(self, column: np.ndarray, steps: np.ndarray, values: np.ndarray) -> None:
        """Add values to their buckets. What can't be drawn (NaN, or beyond float32) leaves a gap."""
        keep = np.abs(values) < _MAX_DRAWABLE
        values = values[keep].astype("f8")
        bucket = np.maximum(steps[keep] - (self._origin or 0), 0) // self._width
        at = bucket * self.num_columns + column[keep]
        np.minimum.at(self._low.reshape(-1), at, values)
        np.maximum.at(self._high.reshape(-1), at, values)
        np.add.at(self._sum.reshape(-1), at, values)
        np.add.at(self._count.reshape(-1), at, 1)


def downsample(history: History, chart: Chart, num_ranks: int, max_buckets: int = MAX_BUCKETS) -> CurveBuckets:
    """The curves of one chart over a whole history, at once."""
    curves = Curves((chart,), num_ranks, max_buckets)
    curves.update(history)
    return curves.get_all()

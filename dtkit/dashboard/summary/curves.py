"""Downsampled curves for all views: a fixed number of buckets that keep every extreme value.

The step axis is divided into buckets of `width` steps. A bucket holds the smallest, the mean and the largest value of
each line of each chart. When the steps exceed the buckets, neighboring buckets are merged and the width doubles. So
100,000 steps cost as much as 500. A spike of one step never disappears, and the mean is a readable line.

Up to ``MAX_NODE_LINES`` ranks have a line each. More ranks share one line, the band over all nodes. The last line of a
chart is the value over all ranks. Charts of values that are equal on all ranks (learning rate, gradient norm) have that
line only. The lines of all charts are columns of one table (:class:`ChartLayout`).

Merging needs the buckets only. A page with a copy merges its own buckets when it gets a new width. It receives only the
changed buckets (:meth:`Curves.take_changes`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.dashboard.summary.step_range import read_range_totals, read_row_blocks
from dtkit.history.growing_array import select_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.history.history import History

MAX_BUCKETS = 512
"""Largest number of buckets, about one for each pixel of a chart. A power of two, so that halves are whole."""

MAX_NODE_LINES = 8
"""Largest number of ranks with a line of their own; more share a band."""

MIDDLE_QUANTILES = (0.1, 0.9)
"""Quantiles between which a band leaves out the fastest and the slowest steps of a busy machine."""

_MAX_DRAWABLE = 1e37  # float32 ends at 3e38, and charts subtract values


@dataclasses.dataclass(frozen=True)
class Chart:
    """A quantity over the steps, read from rows (``ROW_DTYPE``), and from totals (``TOTAL_DTYPE``).

    The second argument of `from_totals` is :attr:`History.ranks_per_replica`. Without `from_rows` there are no lines of
    nodes; without `from_totals` the rows of any rank hold for all.

    A rate is kept as its reciprocal, seconds per sample. The mean of these over steps is the time of all samples over
    their number; a mean of rates would exceed it. Views invert it (:meth:`CurveBuckets.invert`).
    """

    name: str
    from_rows: Callable[[np.ndarray], np.ndarray] | None
    from_totals: Callable[[np.ndarray, int], np.ndarray] | None


@dataclasses.dataclass(frozen=True)
class ChartLayout:
    """Columns of a chart in the table of curves: `nodes` columns from `first` on, then the one over all ranks."""

    name: str
    first: int
    nodes: int
    banded: bool

    @property
    def overall_column(self) -> int:
        """The column of the line over all ranks."""
        return self.first + self.nodes

    @property
    def has_mean(self) -> bool:
        """Whether the line over all ranks is the mean of the nodes' values; that of the throughput has waiting, too."""
        return self.name != THROUGHPUT.name


def compute_own_sample_s(rows: np.ndarray) -> np.ndarray:
    """Return seconds per sample of a rank without its waiting time, in which nodes in step differ."""
    busy = rows["step_s"] - rows["wait_s"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where((busy > 0) & (rows["samples"] > 0), busy / rows["samples"], np.nan))


def find_rows_without_loss(rows: np.ndarray) -> np.ndarray:
    """Return which rows have no loss: of a rank without samples, or of a stage that is not the last one.

    A loss that became NaN has a weight, and doesn't count here.
    """
    return np.asarray(np.isnan(rows["loss"]) & (rows["weight"] == 0))


def count_replicas(num_ranks: int, ranks_per_replica: int) -> int:
    """Return the number of replicas, among which each batch is divided."""
    return max(1, num_ranks // ranks_per_replica)


def format_overall_label(num_ranks: int, ranks_per_replica: int, num_initial_ranks: int | None = None) -> str:
    """Return the label of throughput with waiting, divided by the replicas: ``with waiting``; ``all`` for one."""
    count = count_replicas(
        num_ranks if num_initial_ranks is None else max(num_ranks, num_initial_ranks), ranks_per_replica
    )
    return "all" if count == 1 else "with waiting"


def _compute_mean_sample_s(totals: np.ndarray, ranks_per_replica: int) -> np.ndarray:
    # Multiplication by the replicas gives the scale of the nodes' lines, which are equal to it when no node waits.
    replicas = np.maximum(1, totals["ranks"] // ranks_per_replica)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = totals["step_s"] / totals["samples"] * replicas
    return np.asarray(np.where((totals["step_s"] > 0) & (totals["samples"] > 0), seconds, np.nan))


LOSS = Chart("loss", lambda rows: rows["loss"], lambda totals, _copies: totals["loss"])
THROUGHPUT = Chart("throughput", compute_own_sample_s, _compute_mean_sample_s)
LR = Chart("lr", lambda rows: rows["lr"], None)
GRAD_NORM = Chart("grad_norm", None, lambda totals, _copies: totals["grad_norm"])
STEP_TIME = Chart("step_s", None, lambda totals, _copies: totals["step_s"])
CHARTS = (LOSS, THROUGHPUT, LR, GRAD_NORM, STEP_TIME)


def make_chart_layouts(charts: Sequence[Chart], num_ranks: int, max_lines: int = MAX_NODE_LINES) -> list[ChartLayout]:
    """Return the columns of each chart. Up to `max_lines` ranks have one each."""
    layouts, first = [], 0
    banded = num_ranks > max_lines
    for chart in charts:
        has_node_lines = chart.from_rows is not None and chart.from_totals is not None
        nodes = (1 if banded else num_ranks) if has_node_lines else 0
        layouts.append(ChartLayout(chart.name, first, nodes, banded and has_node_lines))
        first += nodes + 1
    return layouts


@dataclasses.dataclass(frozen=True)
class CurveBuckets:
    """Buckets `first` to `first + len(values)` of some curves.

    `values` is float32 of shape (buckets, columns, 3): smallest, mean, largest; NaN without values. The last bucket
    may have fewer than `width` steps, until `last_step`.
    """

    width: int
    origin: int
    first: int
    values: np.ndarray
    last_step: int

    @property
    def is_flat(self) -> bool:
        """Whether smallest, mean and largest are equal everywhere."""
        low, high = self.values[..., 0], self.values[..., 2]
        return bool(np.array_equal(low, high, equal_nan=True))

    def invert(self) -> CurveBuckets:
        """Return the buckets of the reciprocals: of rates, from seconds per sample."""
        with np.errstate(divide="ignore"):
            return dataclasses.replace(self, values=1 / self.values[..., ::-1])

    def merge_to_quantiles(self, max_buckets: int, banded_columns: int = 0) -> CurveBuckets:
        """Return wider buckets, at most `max_buckets`, with ``MIDDLE_QUANTILES`` of the means instead of extremes.

        The first `banded_columns` are bands over many nodes: their quantiles are those of the lower and upper edge.
        Less than half a bucket of last steps joins the bucket before it: a single step of some milliseconds is no mean.
        """
        factor = 1
        while len(self.values) > max_buckets * factor:
            factor *= 2
        if factor == 1:
            return self
        firsts, lasts = self._find_ends()
        num_steps = lasts - firsts + 1
        starts = list(range(0, len(self.values), factor))
        if 2 * num_steps[starts[-1] :].sum() < factor * self.width:
            starts.pop()
        parts = [slice(*ends) for ends in itertools.pairwise([*starts, len(self.values)])]
        values = np.stack([_find_middle(self.values[part], num_steps[part], banded_columns) for part in parts])
        return dataclasses.replace(self, width=self.width * factor, first=self.first // factor, values=values)

    @property
    def middle_steps(self) -> np.ndarray:
        """The step in the middle of each bucket."""
        firsts, lasts = self._find_ends()
        return np.asarray((firsts + lasts) / 2)

    def _find_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and the last step of each bucket."""
        firsts = self.origin + self.width * np.arange(self.first, self.first + len(self.values))
        return firsts, np.minimum(firsts + self.width - 1, self.last_step)


def _find_middle(part: np.ndarray, num_steps: np.ndarray, banded_columns: int) -> np.ndarray:
    """Return lower quantile, mean and upper quantile of each column, of shape (columns, 3), from several buckets."""
    known = np.isfinite(part).any(axis=0)
    values = np.full(part.shape[1:], np.nan, "f4")
    for column in np.flatnonzero(known[:, 1]):
        low, mean, high = part[:, column].T if column < banded_columns else [part[:, column, 1]] * 3
        has_mean = np.isfinite(mean)
        values[column] = (
            np.nanquantile(low, MIDDLE_QUANTILES[0]),
            np.average(mean[has_mean], weights=num_steps[has_mean]),
            np.nanquantile(high, MIDDLE_QUANTILES[1]),
        )
    return values


class Curves:
    """Curves of a growing history, for `num_ranks` ranks, in at most `max_buckets` buckets.

    More than `max_lines` ranks share a band.
    """

    def __init__(
        self, charts: Sequence[Chart], num_ranks: int, max_buckets: int = MAX_BUCKETS, max_lines: int = MAX_NODE_LINES
    ) -> None:
        self._charts, self._num_ranks = tuple(charts), num_ranks
        self.chart_layouts = make_chart_layouts(charts, num_ranks, max_lines)
        self.num_columns = self.chart_layouts[-1].overall_column + 1
        shape = (max_buckets, self.num_columns)
        self._low, self._high, self._sum = np.empty(shape), np.empty(shape), np.empty(shape)
        self._count = np.empty(shape, "i8")
        self._max_buckets, self._num_returns = max_buckets, 0
        self._clear()

    def _clear(self) -> None:
        self._low[:], self._high[:], self._sum[:], self._count[:] = np.inf, -np.inf, 0, 0
        self._width, self._num_buckets = 1, 0
        self._origin: int | None = None
        self._last_step = 0
        self._num_rows_read = self._num_totals_read = 0
        self._first_changed = 0  # buckets from here on have not been taken

    @property
    def width(self) -> int:
        """Number of steps in a bucket."""
        return self._width

    @property
    def has_changes(self) -> bool:
        """Whether some changed buckets were not taken."""
        return self._first_changed < self._num_buckets

    def update(self, history: History) -> None:
        """Read the new rows of the history; after it went back to an earlier step, all that are valid."""
        if len(history.returns) != self._num_returns:
            self._clear()
            self._num_returns = len(history.returns)
        rows = history.read_valid_rows(self._num_rows_read)
        num_before = min(1, self._num_totals_read)
        totals = history.read_valid_totals(self._num_totals_read - num_before)
        self._num_rows_read += len(rows)
        self._num_totals_read += len(totals) - num_before
        self.add_rows(rows, totals, history.ranks_per_replica, num_before)

    def add_rows(self, rows: np.ndarray, totals: np.ndarray, ranks_per_replica: int, num_before: int = 0) -> None:
        """Add rows of single ranks, and those over all ranks, of the same steps.

        The first `num_before` totals were added before. A chart may need them for the values of the next ones.
        """
        total_steps = totals["step"][num_before:]
        steps = np.concatenate([rows["step"], total_steps])
        if not len(steps):
            return
        self._extend_to(int(steps.min()), int(steps.max()))
        rows = select_rows(rows, rows["rank"] < self._num_ranks)
        is_of_first = rows["rank"] == rows["rank"].min(initial=self._num_ranks)
        parts = []  # columns, steps and values of each line
        for chart, layout in zip(self._charts, self.chart_layouts, strict=True):
            if chart.from_totals is not None:
                values = chart.from_totals(totals, ranks_per_replica)[num_before:]
                parts.append((np.full(len(total_steps), layout.overall_column), total_steps, values))
            if chart.from_rows is not None and len(rows):
                values, steps = chart.from_rows(rows), rows["step"]
                if chart.from_totals is None:  # values that are equal on all ranks are read from one of them
                    values, steps = values[is_of_first], steps[is_of_first]
                line = rows["rank"].astype("i8") if layout.nodes > 1 else np.zeros(len(steps), "i8")
                parts.append((layout.first + line, steps, values))
        if parts:
            self._add_values(*map(np.concatenate, zip(*parts, strict=True)))

    def widen(self, width: int) -> None:
        """Merge buckets until they are at least `width` steps wide, which is a power of two."""
        while self._width < width:
            self._merge_neighbors()

    def take_changes(self, max_buckets: int | None = None, columns: Sequence[int] | None = None) -> CurveBuckets:
        """Return changed buckets that were not taken, the oldest `max_buckets` of them, of some columns or all."""
        stop = self._num_buckets if max_buckets is None else min(self._num_buckets, self._first_changed + max_buckets)
        first, self._first_changed = self._first_changed, max(stop, self._first_changed)
        return self._get_buckets(first, stop, columns)

    def take_all(self, columns: Sequence[int] | None = None) -> CurveBuckets:
        """Return all buckets. None of them counts as changed afterwards."""
        self._first_changed = self._num_buckets
        return self.get_all(columns)

    def get_all(self, columns: Sequence[int] | None = None) -> CurveBuckets:
        """Return all buckets, and keep which of them count as changed."""
        return self._get_buckets(0, self._num_buckets, columns)

    def _get_buckets(self, first: int, stop: int, columns: Sequence[int] | None) -> CurveBuckets:
        part: Any = slice(first, stop)
        if columns is not None:
            part = np.ix_(range(first, stop), columns)
        count = self._count[part]
        has_values = count > 0
        values = np.full((*count.shape, 3), np.nan, "f4")
        values[has_values, 0] = self._low[part][has_values]
        values[has_values, 1] = self._sum[part][has_values] / count[has_values]
        values[has_values, 2] = self._high[part][has_values]
        origin = self._origin or 0
        return CurveBuckets(self._width, origin, first, values, min(self._last_step, origin + stop * self._width - 1))

    def _extend_to(self, first_step: int, last_step: int) -> None:
        """Widen the buckets until `last_step` has one, and note which buckets change."""
        if self._origin is None:
            self._origin = first_step
        self._last_step = max(self._last_step, last_step)
        while (last_step - self._origin) // self._width >= self._max_buckets:
            self._merge_neighbors()
        first = max(0, first_step - self._origin) // self._width
        self._first_changed = min(self._first_changed, first)
        self._num_buckets = max(self._num_buckets, (last_step - self._origin) // self._width + 1)

    def _merge_neighbors(self) -> None:
        """Merge neighboring buckets. The last one may have been half full, so it counts as changed."""
        half, last = self._max_buckets // 2, max(0, self._num_buckets - 1) // 2
        count = self._count[0::2] + self._count[1::2]
        exact = self._sum[0::2] + self._sum[1::2]
        # A page knows means but not counts: here as there, the mean of a pair is the mean of two means.
        # It differs from the exact mean where a NaN left a bucket short, and in the last bucket, which is sent again.
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
        """Add values to their buckets. Values that can't be drawn (NaN, or beyond float32) leave a gap."""
        is_drawable = np.abs(values) < _MAX_DRAWABLE
        values = values[is_drawable].astype("f8")
        bucket = np.maximum(steps[is_drawable] - (self._origin or 0), 0) // self._width
        index = bucket * self.num_columns + column[is_drawable]
        np.minimum.at(self._low.reshape(-1), index, values)
        np.maximum.at(self._high.reshape(-1), index, values)
        np.add.at(self._sum.reshape(-1), index, values)
        np.add.at(self._count.reshape(-1), index, 1)


def downsample(history: History, chart: Chart, num_ranks: int, max_buckets: int = MAX_BUCKETS) -> CurveBuckets:
    """Return the curves of one chart over a whole history."""
    curves = Curves((chart,), num_ranks, max_buckets)
    curves.update(history)
    return curves.get_all()


def read_range(
    history: History, charts: Sequence[Chart], num_ranks: int, first_step: int, last_step: int
) -> CurveBuckets:
    """Return the curves between two steps, as fine as fits: what a page draws when it zooms in."""
    curves, totals = Curves(charts, num_ranks), read_range_totals(history, first_step, last_step)
    curves.add_rows(history.read_valid_rows(0, 0), totals, history.ranks_per_replica)
    for rows in read_row_blocks(history, first_step, last_step):
        curves.add_rows(rows, totals[:0], history.ranks_per_replica)
    return curves.get_all()

"""Who gets which rows, and how many of them each step takes: index arithmetic, and its picture.

:func:`cut` deals the rows of a data set to ranks; a :class:`Partition` keeps the result and shows it.

:func:`row_counts` says how many samples each shard gives to each step. All of its answers come from one total
order. Row j of a shard with s rows has the key (j + 1/2) / s: the moment in the epoch, from 0 to 1, when a
shard that is read evenly reaches the middle of that row. A step takes the next `batch_size` rows in the order
of the keys (ties by shard). So each step is exactly full, every shard gives in proportion to its size, all
shards end together, and the answer for a step depends on no other step. Comparisons are exact, in integers.

Nothing here imports torch, and matplotlib only when a figure is asked for.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import itertools
import json
import math
import sys
import warnings
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

PARTITION_METHODS = ("contiguous", "strided", "stratified")
"""How rows can be cut: blocks, one row to each rank in turn, or every class spread over all ranks."""


# --- how many samples a step takes from each shard ----------------------------------------------------------


def count_samples_per_step(sizes: Sequence[int], batch_size: int, first: int, last: int) -> np.ndarray:
    """Samples of each shard in the steps `first` to `last` - 1 of an epoch: int64, (last - first, ranks).

    Row s adds up to `batch_size`, in the epoch's last step to what is left, and to 0 after it.
    """
    total = sum(map(int, sizes))
    ends = np.minimum(np.arange(first, last + 1, dtype=np.int64), -(-total // batch_size)) * batch_size
    taken: np.ndarray = np.diff(count_cumulative_samples(sizes, np.minimum(ends, total)), axis=0)
    return taken


def count_cumulative_samples(sizes: Sequence[int], num_taken: np.ndarray) -> np.ndarray:
    """How many of the first `taken` samples of an epoch each shard has given; int64, (len(taken), ranks).

    `sizes`: rows of each shard, up to 1e9 in all. `taken`: totals between 0 and sum(sizes), in any order.
    """
    size = np.asarray(sizes, dtype=np.int64)
    result = np.zeros((len(num_taken), len(size)), dtype=np.int64)
    holders = np.flatnonzero(size)
    if len(holders):
        result[:, holders] = _count_lower_keys(size[holders], np.asarray(num_taken, dtype=np.int64))
    return result


def _count_lower_keys(size: np.ndarray, num_taken: np.ndarray) -> np.ndarray:
    """Of each shard, its keys among the `taken` smallest of all.

    Rounding taken * size / n counts the keys up to taken / n, which is a lower set of the order too, and off
    by at most half the number of shards; the difference is made up key by key.
    """
    n = int(size.sum())
    target = num_taken[:, None]
    result: np.ndarray = (2 * target * size + n) // (2 * n)
    missing = num_taken - result.sum(axis=1)
    for direction in (1, -1):
        rows = np.flatnonzero(missing * direction > 0)
        while len(rows):
            shard = _find_nearest_shard(result[rows], num_taken[rows], size, n, direction)
            result[rows, shard] += direction
            missing[rows] -= direction
            rows = rows[missing[rows] != 0]
    return result


def _find_nearest_shard(
    num_held: np.ndarray, num_taken: np.ndarray, size: np.ndarray, n: int, direction: int
) -> np.ndarray:
    """The shard with the smallest key not held (`direction` 1) or the largest key held (-1), for each row.

    The distance of a key from taken / n is a / (2 n s) with an integer `a` below; the smallest a / s wins.
    Two such fractions differ by at least 1e-18 as shards have at most 1e9 rows, so 60 binary digits after the
    point tell any two apart, and 62 bits would not hold the digits before it as well: hence two numbers.
    """
    a = direction * ((2 * num_held + direction) * n - 2 * num_taken[:, None] * size)
    whole, rest = np.divmod(a, size)
    upper, rest = np.divmod(rest << 30, size)
    lower = (rest << 30) // size
    fraction = (upper << 30) | lower
    fraction[whole != whole.min(axis=1, keepdims=True)] = np.iinfo(np.int64).max
    if direction == 1:  # of equal keys, the first shard's comes first
        return np.asarray(fraction.argmin(axis=1))
    return len(size) - 1 - np.asarray(fraction[:, ::-1].argmin(axis=1))


# --- who gets which rows ------------------------------------------------------------------------------------


def partition_rows(
    n: int,
    ranks: int,
    *,
    by: str = "contiguous",
    weights: Sequence[float] | None = None,
    labels: Any = None,
    seed: int | None = None,
) -> list[np.ndarray]:
    """Deal the rows 0 to n - 1 to `ranks` shards: disjoint, complete, the same for the same arguments.

    Returns each rank's rows (int64). Sizes differ by at most one, or stand in proportion to `weights`
    (largest remainder, at least one row each). `seed` permutes the rows first. Raises ValueError for what
    can't be cut.
    """
    shards = _build_shards(n, ranks, by=by, weights=weights, labels=labels, seed=seed)
    return [np.asarray(shard, dtype=np.int64) for shard in shards]


class Partition:
    """One shard of `n` rows per rank: which rows, how many, and a picture of who got what.

    Arguments are those of :func:`cut`. `labels` (one per row; required by "stratified") also show the balance
    of classes, and bring a UserWarning where it differs between shards by more than chance would make it.
    `source` is the cluster's: where the rows themselves lie.
    """

    def __init__(
        self,
        n: int,
        world_size: int,
        *,
        by: str = "contiguous",
        weights: Sequence[float] | None = None,
        labels: Any = None,
        seed: int | None = None,
        source: Any = None,
    ) -> None:
        self._shards = _build_shards(n, world_size, by=by, weights=weights, labels=labels, seed=seed)
        self._n, self._by, self._seed = n, by, seed
        self._weights = None if weights is None else tuple(map(float, weights))
        self._labels = None if labels is None else _check_labels(labels, n)
        self.source = source
        self.note = ""  # what became of a table's columns, or where rows are read from; the cluster's to say
        if skew := self._describe_class_skew():
            warnings.warn(skew, UserWarning, stacklevel=find_caller_stacklevel())

    @property
    def n(self) -> int:
        """Rows in all."""
        return self._n

    @property
    def world_size(self) -> int:
        """Ranks, one shard each."""
        return len(self._shards)

    @property
    def by(self) -> str:
        """How the rows were cut: one of :data:`PARTITION_METHODS`."""
        return self._by

    @property
    def seed(self) -> int | None:
        """What permuted the rows before the cut; None where their order was kept."""
        return self._seed

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The share asked for each rank, or None for equal shards."""
        return self._weights

    @property
    def labels(self) -> np.ndarray | None:
        """One label per row, where they are known."""
        return self._labels

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(map(len, self._shards))

    def indices(self, rank: int) -> np.ndarray:
        """The rows of `rank` (int64), in the order in which the rank holds them."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank={rank} is not of this partition: its ranks are 0 to {self.world_size - 1}. Use one of these."
            )
        return np.asarray(self._shards[rank], dtype=np.int64)

    def flatten_indices(self) -> np.ndarray:
        """All ranks' rows (int32), those of rank 0 first: the form in which they travel."""
        return np.concatenate([np.asarray(shard, dtype=np.int32) for shard in self._shards])

    @functools.cached_property
    def classes(self) -> tuple[Any, ...] | None:
        """The distinct labels in order, or None where labels are unknown or not categorical."""
        return None if self._class_table is None else tuple(self._class_table[0].tolist())

    @functools.cached_property
    def class_counts(self) -> np.ndarray | None:
        """Rows of each class on each rank, (ranks, classes), or None as for `classes`."""
        return None if self._class_table is None else self._class_table[1]

    @functools.cached_property
    def _class_table(self) -> tuple[np.ndarray, np.ndarray] | None:
        found = None if self._labels is None else _encode_labels(self._labels)
        if found is None:
            return None
        names, codes = found
        rows = [np.bincount(codes[_to_index(shard)], minlength=len(names)) for shard in self._shards]
        return names, np.stack(rows)

    def to_dict(self) -> dict[str, Any]:
        """What was asked for and what came of it, as JSON-able data."""
        return {
            "n": self.n,
            "world_size": self.world_size,
            "by": self.by,
            "seed": self.seed,
            "weights": None if self.weights is None else list(self.weights),
            "sizes": list(self.sizes),
        }

    def to_json(self) -> str:
        """:meth:`spec` as one line of JSON."""
        return json.dumps(self.to_dict())

    def figure(self) -> Figure:
        """A picture of who got what: rows by rank and, where labels are known, the balance of classes."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = 1 if self.class_counts is None else 2
        height = min(1.3 + 0.32 * self.world_size, 7.0)
        figure = Figure(figsize=(4.5 * columns, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False)[0]
        figure.suptitle(self._format_headline(), fontsize=10)
        self._draw_rows(axes[0])
        if self.class_counts is not None:
            self._draw_classes(axes[1], self.class_counts)
        return figure

    def _draw_rows(self, ax: Axes) -> None:
        from matplotlib.colors import PowerNorm

        share = np.stack([_compute_density(shard, self.n, self._list_strip_bins()) for shard in self._shards])
        ax.imshow(
            share, aspect="auto", cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest",
            extent=(0, self.n, self.world_size - 0.5, -0.5),
        )  # fmt: skip
        for edge in range(1, self.world_size):
            ax.axhline(edge - 0.5, color="white", linewidth=min(3.0, 48 / self.world_size))
        ax.set(xlabel="row, in the original order", ylabel="rank")
        ax.yaxis.set_major_locator(_make_integer_locator())
        ax.set_title("which rows each rank holds (darker: more of them)", fontsize=9)

    def _list_strip_bins(self) -> int:
        """Stretches that the strip of rows is drawn in: single rows while they can be told apart.

        Beyond that each should hold dozens of rows of every rank, or a fair deal looks like a bar code.
        """
        if self.n <= 400:
            return self.n
        return max(4 * self.world_size, min(400, self.n // (24 * self.world_size)))

    def _draw_classes(self, ax: Axes, table: np.ndarray) -> None:
        share = table / table.sum(axis=1, keepdims=True)
        left = np.zeros(self.world_size)
        for column, (name, colour) in enumerate(zip(self.classes or (), _pick_colors(table.shape[1]), strict=True)):
            ax.barh(
                range(self.world_size), share[:, column], left=left, height=0.8, color=colour,
                edgecolor="white", linewidth=0.5, label=str(name),
            )  # fmt: skip
            left += share[:, column]
        ax.set(xlim=(0, 1), ylim=(self.world_size - 0.5, -0.5), xlabel="share of the rank's rows")
        ax.yaxis.set_major_locator(_make_integer_locator())
        ax.set_title("balance of classes", fontsize=9)
        if table.shape[1] <= _MAX_SHOWN_CLASSES:
            ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=7, frameon=False)

    @functools.cached_property
    def _png_bytes(self) -> bytes:
        with io.BytesIO() as file:
            self.figure().savefig(file, format="png", dpi=90)
            return file.getvalue()

    def _format_headline(self) -> str:
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"{self.n} rows on {self.world_size} ranks, {self.by}{seed}"

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.sizes[:_MAX_SHOWN_RANKS]))
        more = ", ..." if self.world_size > _MAX_SHOWN_RANKS else ""
        note = f", {self.note}" if self.note else ""
        return f"Partition({self._format_headline()}, sizes=({sizes}{more}){note})"

    def _repr_png_(self) -> bytes:
        return self._png_bytes

    def _repr_html_(self) -> str:
        picture = base64.b64encode(self._png_bytes).decode()
        rows = "".join(map(self._format_html_row, range(min(self.world_size, _MAX_SHOWN_RANKS))))
        rest = self.world_size - _MAX_SHOWN_RANKS
        more = f"<p>and {rest} more ranks</p>" if rest > 0 else ""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return (
            f"<div><p>{html.escape(self._format_headline())}</p>{note}"
            f"<table><thead><tr>{self._format_html_head()}</tr></thead><tbody>{rows}</tbody></table>{more}"
            f'<img alt="rows and classes of each rank" src="data:image/png;base64,{picture}"></div>'
        )

    def _format_html_head(self) -> str:
        names = ["rank", "rows", "share", *(f"class {name}" for name in self._format_html_classes())]
        return "".join(f"<th>{html.escape(name)}</th>" for name in names)

    def _format_html_row(self, rank: int) -> str:
        size = self.sizes[rank]
        cells = [str(rank), str(size), f"{size / self.n:.1%}"]
        if self.class_counts is not None and self._format_html_classes():
            cells += map(str, self.class_counts[rank].tolist())
        return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

    def _format_html_classes(self) -> tuple[Any, ...]:
        known = self.classes or ()
        return known if len(known) <= _MAX_SHOWN_CLASSES else ()

    def _describe_class_skew(self) -> str | None:
        """What to warn of, where classes differ between shards by more than chance."""
        if self.class_counts is None or self.world_size == 1:
            return None
        distance, expected = _measure_imbalance(self.class_counts)
        rank = int(np.argmax(distance - expected))
        if distance[rank] <= expected[rank]:
            return None
        return (
            f"the classes of rank {rank}'s rows differ from those of all rows (total-variation distance "
            f"{distance[rank]:.2f}; a random cut stays under {expected[rank]:.2f}), as when labels are "
            f"sorted. Ranks that see other classes than the rest train worse: cut with seed=0 or "
            f"by='stratified'."
        )


_MAX_SHOWN_RANKS = 32
_MAX_SHOWN_CLASSES = 12

# Okabe and Ito's eight colours, which people who can't tell red from green can tell apart.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def as_labels(target: Any) -> np.ndarray | None:
    """`target` as an array of labels, if that is what it holds: one-dimensional, with few distinct values."""
    array = np.asarray(target)
    return array if array.ndim == 1 and len(array) and _encode_labels(array) is not None else None


def _encode_labels(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Distinct labels and each row's place among them; None for values that name no class (floats, ids)."""
    words = labels.dtype == object and all(isinstance(label, str) for label in labels)
    if labels.dtype.kind not in "biuUS" and not words:
        return None
    names, codes = np.unique(labels, return_inverse=True)
    return (names, codes) if len(names) <= max(20, math.isqrt(len(labels))) else None


def _check_labels(labels: Any, n: int) -> np.ndarray:
    array = np.asarray(labels)
    if array.ndim != 1 or len(array) != n:
        raise ValueError(
            f"labels of shape {array.shape} don't fit {n} rows: there must be one label per row. Give a "
            f"one-dimensional array of {n} labels."
        )
    return array


def _measure_imbalance(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each shard's distance from the classes of all rows, and what it must exceed to be worth a warning.

    The distance is the total variation: half the sum of |share in the shard - share in all|. If the m rows of
    a shard are drawn at random from n, without replacement, a share deviates by sigma_c = sqrt(p (1 - p) / m
    * (n - m) / (n - 1)), roughly normal, so that |deviation| has mean sigma_c sqrt(2 / pi) and variance
    sigma_c^2 (1 - 2 / pi). Deviations of two classes correlate with rho^2 = odds_c odds_d, and those of their
    absolute values with at most about rho^2. Five standard deviations above the mean, and one row more as
    shares move in steps of 1 / m, are beyond chance for any number of ranks. Less than 0.1 is not worth a
    word even where chance is excluded.
    """
    n, sizes = table.sum(), table.sum(axis=1)
    share = table.sum(axis=0) / n
    distance = np.abs(table / sizes[:, None] - share).sum(axis=1) / 2
    odds = share / np.maximum(1 - share, 1 / n)
    sigma = np.sqrt(np.outer((n - sizes) / (sizes * (n - 1)), share * (1 - share)))
    mean = sigma.sum(axis=1) * math.sqrt(2 / math.pi) / 2
    crossed = (sigma * odds).sum(axis=1) ** 2 - ((sigma * odds) ** 2).sum(axis=1)
    variance = (1 - 2 / math.pi) * ((sigma**2).sum(axis=1) + crossed) / 4
    return distance, np.maximum(mean + 5 * np.sqrt(np.maximum(variance, 0)) + 1 / sizes, 0.1)


def find_caller_stacklevel() -> int:
    """The stack level of the first caller outside this package, where a warning belongs."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - inspect.stack() reads every source file
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "dtkit":
        frame, level = frame.f_back, level + 1
    return level


def _make_integer_locator() -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _pick_colors(count: int) -> list[Any]:
    """A colour per class: told apart by anybody up to eight, along a map above."""
    if count <= len(_PALETTE):
        return list(_PALETTE[:count])
    import matplotlib as mpl

    return [mpl.colormaps["viridis"](k / (count - 1)) for k in range(count)]


# A shard is kept as a range where it is one, else as 32-bit integers.
_Shard = range | np.ndarray


def _to_index(shard: _Shard) -> Any:
    return slice(shard.start, shard.stop, shard.step) if isinstance(shard, range) else shard


def _compute_density(shard: _Shard, n: int, bins: int) -> np.ndarray:
    """Which share of each of `bins` equal stretches of the n rows the shard holds."""
    edges = np.arange(bins + 1, dtype=np.int64) * n // bins
    held: np.ndarray
    if isinstance(shard, range):
        held = np.diff(np.clip(-(-(edges - shard.start) // shard.step), 0, len(shard)))
    else:
        held = np.bincount(np.searchsorted(edges, shard, side="right") - 1, minlength=bins)
    share: np.ndarray = held / (edges[1:] - edges[:-1])
    return share


_MAX_ROWS = 2**30
"""Above it, the integers of :func:`count_cumulative_samples` would not fit 64 bits."""


def _build_shards(
    n: int, ranks: int, *, by: str, weights: Sequence[float] | None, labels: Any, seed: int | None
) -> list[_Shard]:
    _check_arguments(n, ranks, by, seed)
    if by == "stratified" and labels is None:
        raise ValueError(
            "by='stratified' needs labels: it spreads every class over all ranks. Give labels=, one per row."
        )
    sizes = _compute_sizes(n, ranks, weights)
    order = None if seed is None else _permute_rows(n, seed)
    if by == "speed" and weights is None:
        raise ValueError("by='speed' cuts by measured speeds; cluster.partition(data, by='speed', model=...) measures.")
    if by in ("contiguous", "speed"):
        ends = np.cumsum([0, *sizes]).tolist()
        return [_select_rows(order, range(start, stop)) for start, stop in itertools.pairwise(ends)]
    if by == "strided":
        dealt = _distribute_positions(n, sizes, weighted=weights is not None)
        return [_select_rows(order, positions) for positions in dealt]
    return _order_by_class(_check_labels(labels, n), sizes, order, weighted=weights is not None)


def _check_arguments(n: int, ranks: int, by: str, seed: int | None) -> None:
    if by not in (*PARTITION_METHODS, "speed"):
        raise ValueError(f"by={by!r} is not a way to cut rows. Use one of {', '.join(map(repr, PARTITION_METHODS))}.")
    if ranks < 1:
        raise ValueError(f"{ranks} ranks can't hold anything: there must be at least one. Start an engine.")
    if n < ranks:
        raise ValueError(
            f"{n} samples don't suffice for {ranks} ranks: each rank needs at least one. Give more samples, "
            f"or use at most {n} engines."
        )
    if n > _MAX_ROWS:
        raise ValueError(f"{n} rows are more than {_MAX_ROWS} (2**30), the most that are cut. Group rows first.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0):
        raise ValueError(f"seed={seed!r} is not a seed: it must be an integer from 0 up, or None. Use seed=0.")


def _compute_sizes(n: int, ranks: int, weights: Sequence[float] | None) -> list[int]:
    if weights is None:
        return [n // ranks + (rank < n % ranks) for rank in range(ranks)]
    return _round_by_largest_remainder(n, _check_weights(weights, ranks))


def _check_weights(weights: Sequence[float], ranks: int) -> list[Fraction]:
    values = [float(weight) for weight in weights]
    if len(values) != ranks:
        raise ValueError(f"{len(values)} weights for {ranks} ranks: there must be one per rank. Give {ranks} weights.")
    for rank, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"weights[{rank}]={value} is not a share: every weight must be a finite number above 0. To "
                f"leave a rank out, start fewer engines."
            )
    return [Fraction(value) for value in values]


def _round_by_largest_remainder(n: int, weights: list[Fraction]) -> list[int]:
    """Proportional parts of n in whole rows; a rank whose part rounds to nothing gets one of the largest."""
    total = sum(weights)
    parts = [n * weight / total for weight in weights]
    sizes = [math.floor(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda rank: sizes[rank] - parts[rank])
    for rank in by_remainder[: n - sum(sizes)]:
        sizes[rank] += 1
    for rank in [rank for rank, size in enumerate(sizes) if size == 0]:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[rank] = 1
    return sizes


@functools.lru_cache(maxsize=64)
def divide_proportionally(n: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """`n` samples dealt in proportion to positive shares, in whole numbers; none goes without while n suffices."""
    if n < len(shares):
        return tuple(int(rank < n) for rank in range(len(shares)))
    return tuple(_round_by_largest_remainder(n, [Fraction(share) for share in shares]))


def _permute_rows(n: int, seed: int) -> np.ndarray:
    order: np.ndarray = np.random.default_rng(seed).permutation(np.arange(n, dtype=np.int32))
    return order


def _select_rows(order: np.ndarray | None, positions: _Shard) -> _Shard:
    """The rows at `positions` of the permuted order, in memory of their own."""
    return positions if order is None else order[_to_index(positions)].copy()


def _distribute_positions(n: int, sizes: list[int], *, weighted: bool) -> list[_Shard]:
    """Positions 0 to n - 1 dealt out evenly: in turn, or by the keys of the module's docstring."""
    if not weighted:
        return [range(rank, n, len(sizes)) for rank in range(len(sizes))]
    keys = np.concatenate([(2 * np.arange(size) + 1) / (2 * size) for size in sizes])
    turns = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(keys, kind="stable")]
    return [np.flatnonzero(turns == rank).astype(np.int32) for rank in range(len(sizes))]


def _order_by_class(labels: np.ndarray, sizes: list[int], order: np.ndarray | None, *, weighted: bool) -> list[_Shard]:
    """Rows sorted by class, dealt out in one go: a class, being a run of them, is spread evenly as well."""
    codes = np.unique(labels, return_inverse=True)[1]
    by_class = np.argsort(codes if order is None else codes[order], kind="stable").astype(np.int32)
    shards = []
    for positions in _distribute_positions(len(labels), sizes, weighted=weighted):
        # Within a rank, back to the order that the rows came in: no runs of one class.
        held = np.sort(by_class[_to_index(positions)])
        shards.append(_select_rows(order, held))
    return shards

"""Partitions of a data set: which rows each rank has. Without torch; matplotlib only for figures."""

from __future__ import annotations

import functools
import json
import math
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting, views
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.completion import UserNames, hide_from_completion
from dtkit._util.stacklevel import find_caller_stacklevel
from dtkit.data.sharding import Shard, build_shards, check_labels, to_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

_MAX_LISTED_SIZES = 4
_MAX_LINE = 88


@explain_arguments
@suggest_attributes("partition")
@hide_from_completion("flatten_indices", "format_headline", "note", "source", "to_dict", "to_json")
class Partition(metaclass=UserNames):
    """Partition of `n` rows into one shard for each rank. Notebooks show it as a table and a figure.

    Call ``cluster.partition(data)`` to make one of your data, and pass it to ``cluster.train``. Without data it shows
    how rows would be divided. A UserWarning says if classes differ between shards by more than chance.

    >>> dtkit.Partition(8, 2, weights=[3, 1]).sizes
    (6, 2)

    n : number of rows.
    world_size : number of ranks.
    by, weights, seed : as for :meth:`dtkit.Cluster.partition`; without "speed".
    labels : class of each row; "stratified" needs them. They also show the balance of classes.
    source : what ``cluster.partition`` sets, so that a training finds the rows on the engines.
    """

    source: Any
    note: str

    def __init__(
        self,
        n: int,
        world_size: int,
        *,
        by: str = "contiguous",
        weights: Sequence[float] | None = None,
        labels: ArrayLike | None = None,
        seed: int | None = None,
        source: Any = None,
    ) -> None:
        self._shards = build_shards(n, world_size, by=by, weights=weights, labels=labels, seed=seed)
        self._n, self._by, self._seed = n, by, seed
        self._weights = None if weights is None else tuple(map(float, weights))
        self._labels = None if labels is None else check_labels(labels, n)
        self.source = source
        self.note = ""  # use of a table's columns, or files that rows are read from
        if skew := self._describe_class_skew():
            warnings.warn(skew, UserWarning, stacklevel=find_caller_stacklevel())

    @property
    def n(self) -> int:
        """Number of rows."""
        return self._n

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._shards)

    @property
    def by(self) -> str:
        """Method: "speed", or one of :data:`~dtkit.data.sharding.PARTITION_METHODS`."""
        return self._by

    @property
    def seed(self) -> int | None:
        """Seed of the permutation before the division; None if the order was kept."""
        return self._seed

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Requested share of each rank; None for equal shards."""
        return self._weights

    @property
    def labels(self) -> np.ndarray | None:
        """Label of each row; None if unknown."""
        return self._labels

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each rank."""
        return tuple(map(len, self.shards))

    @property
    def shards(self) -> list[Shard]:
        """Rows of each rank, in a form that takes little memory."""
        return self._shards

    def indices(self, rank: int) -> np.ndarray:
        """Return the rows of `rank` (int64), in the rank's order."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank={rank} is not of this partition: its ranks are 0 to {self.world_size - 1}. Use one of these."
            )
        return np.asarray(self._shards[rank], dtype=np.int64)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        """Raise TypeError: the rows are on engines."""
        raise TypeError("the rows of a partition are on engines; give the arrays that it was made of")

    def flatten_indices(self) -> np.ndarray:
        """Return the rows of all ranks (int32), those of rank 0 first, for sending."""
        return np.concatenate([np.asarray(shard, dtype=np.int32) for shard in self._shards])

    @functools.cached_property
    def classes(self) -> tuple[Any, ...] | None:
        """Distinct labels in order; None if labels are unknown or not categorical."""
        return None if self._class_table is None else tuple(self._class_table[0].tolist())

    @functools.cached_property
    def class_counts(self) -> np.ndarray | None:
        """Number of rows by rank and class; None like `classes`."""
        return None if self._class_table is None else self._class_table[1]

    @functools.cached_property
    def _class_table(self) -> tuple[np.ndarray, np.ndarray] | None:
        encoded = None if self._labels is None else _encode_labels(self._labels)
        if encoded is None:
            return None
        names, codes = encoded
        rows = [np.bincount(codes[to_index(shard)], minlength=len(names)) for shard in self._shards]
        return names, np.stack(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return arguments and sizes as data for JSON."""
        return {
            "n": self.n,
            "world_size": self.world_size,
            "by": self.by,
            "seed": self.seed,
            "weights": None if self.weights is None else list(self.weights),
            "sizes": list(self.sizes),
        }

    def to_json(self) -> str:
        """Return :meth:`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def figure(self) -> Figure:
        """Return a figure of the rows by rank and, if labels are known, of the balance of classes."""
        return views.draw(self)

    def format_headline(self) -> str:
        """Return the size and the method in one line. With a seed, rows are shuffled before they are divided."""
        method = self.by
        if self.seed is not None:
            method = f"shuffled (seed={self.seed})" + (f", then {self.by}" if self.by != "contiguous" else "")
        return f"{self.n:,} rows on {formatting.format_count(self.world_size, 'node')}, {method}"

    def __repr__(self) -> str:
        line = f"Partition({self.format_headline()}, {_format_sizes(self.sizes)})"
        note = textwrap.wrap(self.note, _MAX_LINE, initial_indent="  ", subsequent_indent="  ")
        return "\n".join([line, *note])

    def _repr_png_(self) -> bytes:
        return views.render_png(self)

    def _repr_html_(self) -> str:
        return views.format_html(self)

    def _describe_class_skew(self) -> str | None:
        """Return a warning if classes differ between shards by more than chance."""
        if self.class_counts is None or self.world_size == 1:
            return None
        distance, expected = _measure_imbalance(self.class_counts)
        rank = int(np.argmax(distance - expected))
        if distance[rank] <= expected[rank]:
            return None
        return (
            f"the classes of rank {rank}'s rows differ from those of all rows (total-variation distance "
            f"{distance[rank]:.2f}; a random cut stays under {expected[rank]:.2f}), as when labels are "
            f"sorted. Ranks with other classes than the rest train worse: use seed=0 or by='stratified'."
        )


def _format_sizes(sizes: Sequence[int]) -> str:
    """Return the rows of each rank in few words: ``7 or 8 each``."""
    least, most = min(sizes), max(sizes)
    if most - least <= 1:
        return f"{least:,} each" if least == most else f"{least:,} or {most:,} each"
    if len(sizes) <= _MAX_LISTED_SIZES:
        return " + ".join(f"{size:,}" for size in sizes)
    return f"{least:,} to {most:,} each"


def as_labels(target: Any) -> np.ndarray | None:
    """Return `target` as an array of labels; None unless it is one-dimensional with few distinct values."""
    array = np.asarray(target)
    return array if array.ndim == 1 and len(array) and _encode_labels(array) is not None else None


def _encode_labels(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return distinct labels and the index of each row's label; None for values that are not classes (floats, ids)."""
    words = labels.dtype == object and all(isinstance(label, str) for label in labels)
    if labels.dtype.kind not in "biuUS" and not words:
        return None
    names, codes = np.unique(labels, return_inverse=True)
    return (names, codes) if len(names) <= max(20, math.isqrt(len(labels))) else None


def _measure_imbalance(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each shard's distance from the classes of all rows, and the largest distance that chance explains.

    The distance is the total variation: half the sum of |share in the shard - share in all|. Suppose that the m rows of
    a shard are drawn at random from n, without replacement. Then a share's deviation is roughly normal with sigma_c =
    sqrt(p (1 - p) / m * (n - m) / (n - 1)). So |deviation| has mean sigma_c sqrt(2 / pi) and variance sigma_c^2 (1 - 2
    / pi). Deviations of two classes correlate with rho^2 = odds_c odds_d, and their absolute values with at most about
    rho^2. The limit is five standard deviations above the mean, and one row more because shares have steps of 1 / m. A
    distance below 0.1 never matters.
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

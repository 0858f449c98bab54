"""Figure and HTML of a partition. matplotlib is imported for figures only."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting
from dtkit._util.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from dtkit.data.partition import Partition
    from dtkit.data.sharding import Shard

_MAX_SHOWN_RANKS = 10  # of more, the first and the last ones
_MAX_SHOWN_CLASSES = 12
_MAX_BINS = 400

# Okabe and Ito's eight colors, which color-blind readers can distinguish.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def draw_partition(partition: Partition) -> Figure:
    """Return a figure of the rows by rank and, if labels are known, of the balance of classes below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = 1 if partition.class_counts is None else 2
    height = min(1.3 + 0.36 * partition.world_size, 7.0)
    figure = Figure(figsize=(6.0, height * parts), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(parts, 1, squeeze=False)[:, 0]
    _draw_rows(axes[0], partition)
    if partition.class_counts is not None:
        _draw_classes(axes[1], partition.classes or (), partition.class_counts)
    return figure


def format_html(partition: Partition) -> str:
    """Return the headline, the note and tables of ranks and of classes as HTML.

    The table of classes is folded, since the figure shows the same.
    """
    ranks = _choose_ranks(partition.world_size)
    rows = [["…"] * 3 if rank is None else _format_row(partition, rank) for rank in ranks]
    shown = _wrap_table(Table(["node", "rows", "share"], rows))
    for table in _make_class_table(partition, ranks):
        shown += f"<details><summary>rows of each class</summary>{_wrap_table(table)}</details>"
    note = f"<p>{html.escape(formatting.name_nodes(partition.note))}</p>" if partition.note else ""
    return f"<p>{html.escape(partition.format_headline())}</p>{note}{shown}"


def _wrap_table(table: Table) -> str:
    return f'<div style="overflow-x: auto">{table.to_html()}</div>'


def _choose_ranks(world_size: int) -> list[int | None]:
    """Return the ranks to show; None in the place of those left out."""
    if world_size <= _MAX_SHOWN_RANKS:
        return list(range(world_size))
    half = _MAX_SHOWN_RANKS // 2
    return [*range(half), None, *range(world_size - half, world_size)]


def _format_row(partition: Partition, rank: int) -> list[str]:
    size = partition.sizes[rank]
    return [str(rank), f"{size:,}", f"{100 * size / partition.n:.1f} %"]


def _make_class_table(partition: Partition, ranks: Sequence[int | None]) -> list[Table]:
    """Return the rows of each class by node, if there are labels: turned so that the table is narrow."""
    classes = _get_shown_classes(partition)
    if partition.class_counts is None or not classes:
        return []
    counts = partition.class_counts.tolist()
    columns = [["", *(f"class {name}" for name in classes)]]
    for rank in ranks:
        line = ["…"] * len(classes) if rank is None else [f"{count:,}" for count in counts[rank]]
        columns.append(["…" if rank is None else f"node {rank}", *line])
    lines = columns if len(classes) <= len(ranks) else [list(line) for line in zip(*columns, strict=True)]
    return [Table(lines[0], lines[1:], {""})]


def _get_shown_classes(partition: Partition) -> tuple[Any, ...]:
    classes = partition.classes or ()
    return classes if len(classes) <= _MAX_SHOWN_CLASSES else ()


def _draw_rows(ax: Axes, partition: Partition) -> None:
    from matplotlib.colors import PowerNorm

    n, world_size = partition.n, partition.world_size
    bins = _choose_bins(n, world_size)
    share = np.stack([compute_density(shard, n, bins) for shard in partition.shards])
    ax.imshow(
        share, aspect="auto", cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest",
        extent=(0, n, world_size - 0.5, -0.5),
    )  # fmt: skip
    for edge in range(1, world_size):
        ax.axhline(edge - 0.5, color="white", linewidth=min(3.0, 48 / world_size))
    ax.set(xlabel="row, in the original order", ylabel="node")
    ax.yaxis.set_major_locator(_make_integer_locator())
    ax.set_title("which rows each node holds (darker: more of them)", fontsize=9)


def _choose_bins(n: int, world_size: int) -> int:
    """Return the number of bins: single rows if they can be seen, else bins with dozens of rows of every rank.

    With fewer rows in a bin, an even division would look like a bar code.
    """
    return n if n <= _MAX_BINS else max(4 * world_size, min(_MAX_BINS, n // (24 * world_size)))


def compute_density(shard: Shard, n: int, bins: int) -> np.ndarray:
    """Return the shard's share of each of `bins` equal parts of the n rows."""
    edges = np.arange(bins + 1, dtype=np.int64) * n // bins
    held: np.ndarray
    if isinstance(shard, range):
        held = np.diff(np.clip(-(-(edges - shard.start) // shard.step), 0, len(shard)))
    else:
        held = np.bincount(np.searchsorted(edges, shard, side="right") - 1, minlength=bins)
    share: np.ndarray = held / (edges[1:] - edges[:-1])
    return share


def _draw_classes(ax: Axes, classes: tuple[Any, ...], class_counts: np.ndarray) -> None:
    world_size, num_classes = class_counts.shape
    share = class_counts / class_counts.sum(axis=1, keepdims=True)
    left = np.zeros(world_size)
    for column, (name, color) in enumerate(zip(classes, _pick_colors(num_classes), strict=True)):
        ax.barh(
            range(world_size), share[:, column], left=left, height=0.8, color=color,
            edgecolor="white", linewidth=0.5, label=str(name),
        )  # fmt: skip
        left += share[:, column]
    ax.set(xlim=(0, 1), ylim=(world_size - 0.5, -0.5), xlabel="share of the node's rows")
    ax.yaxis.set_major_locator(_make_integer_locator())
    ax.set_title("balance of classes", fontsize=9)
    if num_classes <= _MAX_SHOWN_CLASSES:
        ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False, labelspacing=0.15)


def _make_integer_locator() -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _pick_colors(count: int) -> list[Any]:
    """Return a color for each class: from the palette if it suffices, else along a color map."""
    if count <= len(_PALETTE):
        return list(_PALETTE[:count])
    import matplotlib as mpl

    return [mpl.colormaps["viridis"](k / (count - 1)) for k in range(count)]

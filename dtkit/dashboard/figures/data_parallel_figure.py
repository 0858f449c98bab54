"""A step taken apart, as a picture: rows and losses by rank above, gradients by layer below.

The panel of losses shows the mean as areas: a bar as wide as the rank's weight and as high as its loss, and the line
of the step's loss, which makes one bar of the same area. The panel of gradients has a group of bars a layer: each
rank's own gradient, and in black the sum that all ranks hold after the all-reduce.

As in :mod:`dtkit.dashboard.figures.run_figure`: no pyplot, every colour given, and no text read as mathematics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dtkit._util import formatting
from dtkit.dashboard.figures.style import COLORS, MUTED_COLOR, TEXT_COLOR, style_axes
from dtkit.dashboard.text import data_parallel_text
from dtkit.explain.data_parallel import max_or_none

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from dtkit.explain.data_parallel import LayerRecord, RankRecord, StepExplanation

_WIDTH_IN = 11.0  # inches, as the heights
_STRIP_HEIGHT_IN, _MIN_STRIPS_HEIGHT_IN = 0.24, 1.5
_BAR_HEIGHT_IN, _MAX_BARS_HEIGHT_IN = 0.1, 7.0  # a bar, and all of them: many layers or ranks make thinner bars
_LAYER_GAP_BARS = 1.5  # between two layers, in bars
_FRAME_HEIGHT_IN = 2.3  # titles, legend, axis labels and the line of checksums
_NUM_POSITIONS = 600  # places along the strip of rows that can be told apart
_NARROW_WEIGHT, _MIN_LABEL_WEIGHT = 0.19, 0.045  # weights of ranks
_LOG_SCALE_RATIO = 100.0  # the ratio of gradients from which a linear axis would hide the small ones
_MAX_NAME_CHARS = 30  # characters of a layer's name beside its bars
_LEGEND_COLUMNS = 5  # names in a line
_SUM_LABEL = "all-reduced"


def draw_step(explanation: StepExplanation) -> Figure:
    """Draw the step: rows and losses by rank, gradients by layer, checksums."""
    layers, ranks = explanation.group_layers(), explanation.ranks
    series = _name_bars(explanation)
    upper = max(_MIN_STRIPS_HEIGHT_IN, _STRIP_HEIGHT_IN * min(len(ranks), data_parallel_text.MAX_RANKS))
    lower = min(_MAX_BARS_HEIGHT_IN, _BAR_HEIGHT_IN * (len(series) + _LAYER_GAP_BARS) * len(layers))
    figure = Figure(figsize=(_WIDTH_IN, upper + lower + _FRAME_HEIGHT_IN), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        data_parallel_text.format_headline(explanation), x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=TEXT_COLOR,
        parse_math=False,
    )  # fmt: skip
    grid = figure.add_gridspec(2, 2, height_ratios=(upper, lower), width_ratios=(1.45, 1))
    _draw_rows(figure.add_subplot(grid[0, 0]), explanation)
    _draw_losses(figure.add_subplot(grid[0, 1]), explanation)
    bars = figure.add_subplot(grid[1, 0])
    _draw_gradients(bars, explanation, layers, series)
    _write_columns(figure.add_subplot(grid[1, 1], sharey=bars), explanation, layers)
    figure.supxlabel(
        _describe_checksums(explanation), x=0.012, ha="left", fontsize=9, fontweight="bold", parse_math=False,
        color=TEXT_COLOR if explanation.identical else COLORS[5],
    )  # fmt: skip
    return figure


# -- rows and losses by rank -----------------------------------------------------------------------------------------


def _draw_rows(ax: Axes, explanation: StepExplanation) -> None:
    """A strip a rank, with a mark where it took a row of the data."""
    shown = explanation.ranks[: data_parallel_text.MAX_RANKS]
    end = max((int(r.rows.max()) + 1 for r in explanation.ranks if r.rows is not None and len(r.rows)), default=1)
    _style_panel(ax, "Rows of each rank", "row, in the original order")
    for k, rank in enumerate(shown):
        if rank.samples and rank.rows is not None:
            places = (
                np.unique(rank.rows * _NUM_POSITIONS // end) * end / _NUM_POSITIONS
                if end > _NUM_POSITIONS
                else rank.rows
            )
            ax.vlines(places, k - 0.36, k + 0.36, color=_get_rank_color(explanation, rank.rank), linewidth=1.2)
        else:
            ax.text(end / 2, k, _describe_missing_rows(rank), ha="center", va="center", fontsize=8, color=MUTED_COLOR)
    ax.set(xlim=(-0.5 - 0.01 * end, end - 0.5 + 0.01 * end), ylim=(len(shown) - 0.5, -0.5))
    _label_ranks(ax, shown)
    rest = len(explanation.ranks) - len(shown)
    if rest:
        ax.set_title(f"and {formatting.format_count(rest, 'more rank')}", loc="right", fontsize=8, color=MUTED_COLOR)


def _describe_missing_rows(rank: RankRecord) -> str:
    if not rank.samples:
        return data_parallel_text.format_row_numbers(rank)
    return f"{formatting.format_count(rank.samples, 'sample')} {data_parallel_text.format_row_numbers(rank)}"


def _draw_losses(ax: Axes, explanation: StepExplanation) -> None:
    """A bar a rank, as wide as its weight in the mean and as high as its loss."""
    _style_panel(ax, "Loss of each rank", "weight in the mean: widths add up to 1")
    ax.grid(visible=False)
    left = 0.0
    for rank in explanation.ranks:
        if rank.loss is not None and np.isfinite(rank.loss) and rank.share:
            ax.bar(
                left, rank.loss, rank.share, align="edge", color=_get_rank_color(explanation, rank.rank), edgecolor="white",
                linewidth=1.0 if len(explanation.ranks) <= data_parallel_text.MAX_RANKS else 0.0,
            )  # fmt: skip
            _label_loss_bar(ax, explanation, rank, left + rank.share / 2)
        left += rank.share
    ax.set_xlim(0, max(left, 1e-9))
    if np.isfinite(explanation.loss):
        ax.axhline(explanation.loss, color=TEXT_COLOR, linewidth=1.5, linestyle=(0, (3, 1.6)))
        ax.set_title(
            f"of the step: {data_parallel_text.format_number(explanation.loss)}",
            loc="right",
            fontsize=9,
            color=TEXT_COLOR,
        )


def _label_loss_bar(ax: Axes, explanation: StepExplanation, rank: RankRecord, middle: float) -> None:
    """Words in a rank's bar: upright in a narrow one, none where there is no room at all."""
    upright = rank.share < _NARROW_WEIGHT
    if rank.loss is None or rank.share < _MIN_LABEL_WEIGHT:
        return
    loss, share = data_parallel_text.format_number(rank.loss), data_parallel_text.format_weight(explanation, rank)
    words = f"rank {rank.rank}: {loss}" if upright else f"rank {rank.rank}\n{share} of\n{loss}"
    ax.text(
        middle, rank.loss / 2, words, ha="center", va="center", fontsize=7.5 if upright else 8, color=TEXT_COLOR,
        rotation=90 if upright else 0, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.2},
    )  # fmt: skip


# -- gradients by layer ----------------------------------------------------------------------------------------------


def _name_bars(explanation: StepExplanation) -> list[str]:
    """The bars of each layer, from above: a rank each (of many one for all), and the sum."""
    ranks = explanation.ranks
    own = [f"rank {r.rank}" for r in ranks] if len(ranks) <= len(COLORS) else ["smallest to largest of the ranks"]
    return [*own, _SUM_LABEL]


def _draw_gradients(
    ax: Axes, explanation: StepExplanation, layers: Sequence[LayerRecord], bar_names: Sequence[str]
) -> None:
    unit = 1 / (len(bar_names) + _LAYER_GAP_BARS)  # a layer's group is 1 high
    many = len(explanation.ranks) > len(COLORS)
    for k, name in enumerate(bar_names):
        at = np.arange(len(layers)) + (k - (len(bar_names) - 1) / 2) * unit
        if name == _SUM_LABEL:
            _draw_norm_bars(ax, at, [max_or_none(layer.reduced) for layer in layers], unit, TEXT_COLOR, name)
        elif many:
            _draw_norm_ranges(ax, at, layers, unit, name)
        else:
            _draw_norm_bars(ax, at, [layer.own[k] for layer in layers], unit, COLORS[k], name)
    rows = -(-len(bar_names) // _LEGEND_COLUMNS)
    _style_panel(ax, "Gradient of each layer: on each rank, and all-reduced", "norm of the gradient", pad=8 + 13 * rows)
    ax.set_ylim(len(layers) - 0.5, -0.5)
    ax.set_yticks(range(len(layers)), [_format_layer_name(layer) for layer in layers])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    _scale_norm_axis(ax, layers)
    ax.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=_LEGEND_COLUMNS, fontsize=8, frameon=False, labelcolor=TEXT_COLOR,
        handlelength=1, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _format_layer_name(layer: LayerRecord) -> str:
    name = data_parallel_text.shorten_name(layer.name, _MAX_NAME_CHARS)
    return name if layer.tensors == 1 else f"{name} ({data_parallel_text.format_shape(layer)})"


def _draw_norm_bars(
    ax: Axes, positions: np.ndarray, norms: Sequence[float | None], height: float, color: str, name: str
) -> None:
    values = [norm if norm is not None and np.isfinite(norm) else 0.0 for norm in norms]
    ax.barh(positions, values, height * 0.92, color=color, label=name, gid=name)


def _draw_norm_ranges(ax: Axes, positions: np.ndarray, layers: Sequence[LayerRecord], height: float, name: str) -> None:
    """Of many ranks: a bar from the smallest norm to the largest."""
    found = [[n for n in layer.own if n is not None and np.isfinite(n)] or [0.0] for layer in layers]
    low, high = np.array([min(norms) for norms in found]), np.array([max(norms) for norms in found])
    ax.barh(positions, high - low, height * 0.92, left=low, color=COLORS[0], label=name, gid=name)


def _scale_norm_axis(ax: Axes, layers: Sequence[LayerRecord]) -> None:
    """A logarithmic axis where the gradients are of very different sizes, and says so."""
    norms = np.array([n for layer in layers for n in (*layer.own, *layer.reduced) if n], float)
    norms = norms[np.isfinite(norms)]
    if len(norms) and norms.max() / norms.min() > _LOG_SCALE_RATIO:
        ax.set_xscale("log")
        ax.set_xlim(norms.min() / 2, norms.max() * 1.3)
        ax.set_xlabel("norm of the gradient, on a logarithmic scale", fontsize=8, color=MUTED_COLOR)


def _write_columns(ax: Axes, explanation: StepExplanation, layers: Sequence[LayerRecord]) -> None:
    """Beside the bars, the numbers of the same layers."""
    columns = (
        (0.0, "all-reduced\nnorm", [_format_common_value(layer.reduced) for layer in layers]),
        (
            0.2,
            "cosine of own\nand all-reduced",
            [data_parallel_text.format_range(layer.cosine, data_parallel_text.format_cosine) for layer in layers],
        ),
        (0.48, "norm of\nthe update", [_format_common_value(layer.update) for layer in layers]),
        (
            0.71,
            "checksum\nafter the step",
            [data_parallel_text.format_checksum(explanation, layer) for layer in layers],
        ),
    )
    ax.set_axis_off()
    place = ax.get_yaxis_transform()  # across in shares of the axes, down by layer
    for x, title, cells in columns:
        ax.text(
            x, 1.0, title + "\n", transform=ax.transAxes, va="bottom", fontsize=8, color=MUTED_COLOR, linespacing=1.2
        )
        for k, cell in enumerate(cells):
            colour = COLORS[5] if "differ" in cell.lower() else TEXT_COLOR
            ax.text(x, k, cell, transform=place, va="center", fontsize=8, color=colour)


def _format_common_value(values: Sequence[float | None]) -> str:
    """The number that all ranks should hold."""
    shown = {data_parallel_text.format_number(value) for value in values}
    return shown.pop() if len(shown) == 1 else "ranks differ"


def _describe_checksums(explanation: StepExplanation) -> str:
    verdict = data_parallel_text.describe_agreement(explanation)
    first = explanation.ranks[0]
    if not explanation.updated:
        return f"No update: the gradients are not finite. {verdict}"
    if explanation.identical:
        return f"Parameters {first.before} → {first.after}. {verdict}"
    return verdict


# -- common ----------------------------------------------------------------------------------------------------------


def _get_rank_color(explanation: StepExplanation, rank: int) -> str:
    """A colour a rank as long as they can be told apart."""
    return COLORS[rank] if len(explanation.ranks) <= len(COLORS) else COLORS[0]


def _label_ranks(ax: Axes, ranks: Sequence[RankRecord]) -> None:
    ax.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    ax.grid(visible=False)


def _style_panel(ax: Axes, title: str, xlabel: str, pad: float = 6.0) -> None:
    style_axes(ax, "x", TEXT_COLOR)
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR, pad=pad)
    ax.set_xlabel(xlabel, fontsize=8, color=MUTED_COLOR)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6))

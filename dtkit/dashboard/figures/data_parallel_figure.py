"""The figure of an explained data-parallel step: rows and losses by rank above, gradients by layer below.

The panel of losses shows the mean as areas: a bar's width is the rank's weight, its height the rank's loss. The line of
the step's loss bounds the same area. The panel of gradients has a group of bars for each layer. They are each rank's
own gradient and, in black, the sum after the all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.figures.style import COLORS, MUTED_COLOR, TEXT_COLOR
from dtkit.dashboard.text import data_parallel_text
from dtkit.dashboard.text.numbers import MAX_RANKS, describe_remaining, format_number, shorten_name
from dtkit.explain.data_parallel import max_or_none

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.explain.data_parallel import LayerRecord, RankRecord, StepExplanation

_WIDTH_IN = 8.0  # with all of its columns of numbers, in a cell of 616 pixels
_STRIP_HEIGHT_IN, _MIN_STRIPS_HEIGHT_IN, _LOSS_HEIGHT_IN = 0.24, 1.5, 1.5
_BAR_HEIGHT_IN, _MAX_BARS_HEIGHT_IN = 0.1, 5.7  # of one bar, and of all bars
_LAYER_GAP_BARS = 1.5  # between two layers, in bars
_FRAME_HEIGHT_IN = 2.8  # titles, legend, axis labels and the line of checksums
_NUM_POSITIONS = 600  # positions on a strip of rows that can be distinguished
_NARROW_WEIGHT, _MIN_LABEL_WEIGHT = 0.19, 0.045  # below these, a label is upright, or left out
_LOG_SCALE_RATIO = 100.0  # from this ratio of norms on, a linear axis would hide the small ones
_MAX_NAME_CHARS = 30
_LEGEND_COLUMNS = 5
_SUM_LABEL = "all-reduced"


def draw_step(explanation: StepExplanation) -> Figure:
    """Draw rows and losses by rank, gradients by layer, and checksums."""
    layers, ranks = explanation.group_layers(), explanation.ranks
    series = _name_bars(explanation)
    upper = max(_MIN_STRIPS_HEIGHT_IN, _STRIP_HEIGHT_IN * min(len(ranks), MAX_RANKS))
    lower = min(_MAX_BARS_HEIGHT_IN, _BAR_HEIGHT_IN * (len(series) + _LAYER_GAP_BARS) * len(layers))
    figure = create_figure(_WIDTH_IN, upper + _LOSS_HEIGHT_IN + lower + _FRAME_HEIGHT_IN)
    style.set_figure_title(figure, data_parallel_text.format_headline(explanation))
    grid = figure.add_gridspec(3, 2, height_ratios=(upper, _LOSS_HEIGHT_IN, lower), width_ratios=(1.2, 1))
    _draw_rows(figure.add_subplot(grid[0, :]), explanation)
    _draw_losses(figure.add_subplot(grid[1, :]), explanation)
    bars = figure.add_subplot(grid[2, 0])
    _draw_gradients(bars, explanation, layers, series)
    _write_columns(figure.add_subplot(grid[2, 1], sharey=bars), explanation, layers)
    note_color = TEXT_COLOR if explanation.identical else COLORS[5]
    style.set_figure_note(figure, _describe_checksums(explanation), note_color)
    return figure


# -- rows and losses by rank -----------------------------------------------------------------------------------------


def _draw_rows(ax: Axes, explanation: StepExplanation) -> None:
    """Draw a strip for each rank, with a mark at each row that it took."""
    shown = explanation.ranks[:MAX_RANKS]
    end = max((int(r.rows.max()) + 1 for r in explanation.ranks if r.rows is not None and len(r.rows)), default=1)
    _style_panel(ax, "Rows of each node", "row, in the original order")
    for k, rank in enumerate(shown):
        if rank.samples and rank.rows is not None:
            ax.vlines(
                _thin_out(rank.rows, end),
                k - 0.36,
                k + 0.36,
                color=_get_rank_color(explanation, rank.rank),
                linewidth=1.2,
            )
        else:
            ax.text(end / 2, k, _describe_missing_rows(rank), ha="center", va="center", fontsize=8, color=MUTED_COLOR)
    ax.set(xlim=(-0.5 - 0.01 * end, end - 0.5 + 0.01 * end), ylim=(len(shown) - 0.5, -0.5))
    _label_ranks(ax, shown)
    for note in describe_remaining(len(explanation.ranks), "node"):
        ax.set_title(note, loc="right", fontsize=8, color=MUTED_COLOR)


def _thin_out(rows: np.ndarray, end: int) -> np.ndarray:
    """Return one row for each position that can be distinguished."""
    if end <= _NUM_POSITIONS:
        return rows
    return np.asarray(np.unique(rows * _NUM_POSITIONS // end) * end / _NUM_POSITIONS)


def _describe_missing_rows(rank: RankRecord) -> str:
    if not rank.samples:
        return data_parallel_text.format_row_numbers(rank)
    return f"{formatting.format_count(rank.samples, 'sample')} {data_parallel_text.format_row_numbers(rank)}"


def _draw_losses(ax: Axes, explanation: StepExplanation) -> None:
    """Draw a bar for each rank, as wide as its weight in the mean and as high as its loss."""
    _style_panel(ax, "Loss of each node", "weight in the mean: widths add up to 1")
    ax.grid(visible=False)
    left = 0.0
    for rank in explanation.ranks:
        if rank.loss is not None and np.isfinite(rank.loss) and rank.share:
            ax.bar(
                left, rank.loss, rank.share, align="edge", color=_get_rank_color(explanation, rank.rank),
                edgecolor="white", linewidth=1.0 if len(explanation.ranks) <= MAX_RANKS else 0.0,
            )  # fmt: skip
            _label_loss_bar(ax, explanation, rank, left + rank.share / 2)
        left += rank.share
    ax.set_xlim(0, max(left, 1e-9))
    if np.isfinite(explanation.loss):
        ax.axhline(explanation.loss, color=TEXT_COLOR, linewidth=1.5, linestyle=(0, (3, 1.6)))
        text = f"of the step: {format_number(explanation.loss)}"
        ax.set_title(text, loc="right", fontsize=9, color=TEXT_COLOR)


def _label_loss_bar(ax: Axes, explanation: StepExplanation, rank: RankRecord, middle: float) -> None:
    """Write the loss into a rank's bar: upright in a narrow bar, and not into a very narrow one."""
    is_upright = rank.share < _NARROW_WEIGHT
    if rank.loss is None or rank.share < _MIN_LABEL_WEIGHT:
        return
    loss, share = format_number(rank.loss), data_parallel_text.format_weight(explanation, rank)
    text = f"node {rank.rank}: {loss}" if is_upright else f"node {rank.rank}\n{share} of\n{loss}"
    ax.text(
        middle, rank.loss / 2, text, ha="center", va="center", fontsize=7.5 if is_upright else 8, color=TEXT_COLOR,
        rotation=90 if is_upright else 0, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.2},
    )  # fmt: skip


# -- gradients by layer ----------------------------------------------------------------------------------------------


def _name_bars(explanation: StepExplanation) -> list[str]:
    """Return the names of a layer's bars, from above: the ranks, or one for many ranks, and the sum."""
    ranks = explanation.ranks
    names = [f"node {r.rank}" for r in ranks] if len(ranks) <= len(COLORS) else ["smallest to largest of the nodes"]
    return [*names, _SUM_LABEL]


def _draw_gradients(
    ax: Axes, explanation: StepExplanation, layers: Sequence[LayerRecord], bar_names: Sequence[str]
) -> None:
    unit = 1 / (len(bar_names) + _LAYER_GAP_BARS)  # a layer's group is 1 high
    has_many_ranks = len(explanation.ranks) > len(COLORS)
    for k, name in enumerate(bar_names):
        positions = np.arange(len(layers)) + (k - (len(bar_names) - 1) / 2) * unit
        if name == _SUM_LABEL:
            _draw_norm_bars(ax, positions, [max_or_none(layer.reduced) for layer in layers], unit, TEXT_COLOR, name)
        elif has_many_ranks:
            _draw_norm_ranges(ax, positions, layers, unit, name)
        else:
            _draw_norm_bars(ax, positions, [layer.local_norm[k] for layer in layers], unit, COLORS[k], name)
    rows = -(-len(bar_names) // _LEGEND_COLUMNS)
    _style_panel(ax, "Gradient of each layer", "norm of the gradient", pad=8 + 13 * rows)
    ax.set_ylim(len(layers) - 0.5, -0.5)
    ax.set_yticks(range(len(layers)), [_format_layer_name(layer) for layer in layers])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    _scale_norm_axis(ax, layers)
    ax.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=_LEGEND_COLUMNS, fontsize=8, frameon=False,
        labelcolor=TEXT_COLOR, handlelength=1, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _format_layer_name(layer: LayerRecord) -> str:
    name = shorten_name(layer.name, _MAX_NAME_CHARS)
    return name if layer.tensors == 1 else f"{name} ({data_parallel_text.format_shape(layer)})"


def _draw_norm_bars(
    ax: Axes, positions: np.ndarray, norms: Sequence[float | None], height: float, color: str, name: str
) -> None:
    values = [norm if norm is not None and np.isfinite(norm) else 0.0 for norm in norms]
    ax.barh(positions, values, height * 0.92, color=color, label=name, gid=name)


def _draw_norm_ranges(ax: Axes, positions: np.ndarray, layers: Sequence[LayerRecord], height: float, name: str) -> None:
    """Draw a bar from the smallest norm of all ranks to the largest."""
    finite = [
        [norm for norm in layer.local_norm if norm is not None and np.isfinite(norm)] or [0.0] for layer in layers
    ]
    low, high = np.array([min(norms) for norms in finite]), np.array([max(norms) for norms in finite])
    ax.barh(positions, high - low, height * 0.92, left=low, color=COLORS[0], label=name, gid=name)


def _scale_norm_axis(ax: Axes, layers: Sequence[LayerRecord]) -> None:
    """Use a logarithmic axis where the norms differ much."""
    norms = np.array([n for layer in layers for n in (*layer.local_norm, *layer.reduced) if n], float)
    norms = norms[np.isfinite(norms)]
    if len(norms) and norms.max() / norms.min() > _LOG_SCALE_RATIO:
        ax.set_xscale("log")
        style.format_log_axis(ax.xaxis, format_number)
        ax.set_xlim(norms.min() / 2, norms.max() * 1.3)
        ax.set_xlabel("norm of the gradient, on a logarithmic scale", fontsize=8, color=MUTED_COLOR)


def _write_columns(ax: Axes, explanation: StepExplanation, layers: Sequence[LayerRecord]) -> None:
    """Write the numbers of the layers next to their bars."""
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
    transform = ax.get_yaxis_transform()  # x as a share of the axes, y by layer
    for x, title, cells in columns:
        ax.text(
            x, 1.0, title + "\n", transform=ax.transAxes, va="bottom", fontsize=8, color=MUTED_COLOR, linespacing=1.2
        )
        for k, cell in enumerate(cells):
            color = COLORS[5] if "differ" in cell.lower() else TEXT_COLOR
            ax.text(x, k, cell, transform=transform, va="center", fontsize=8, color=color)


def _format_common_value(values: Sequence[float | None]) -> str:
    """Return the number that all ranks should hold."""
    texts = {format_number(value) for value in values}
    return texts.pop() if len(texts) == 1 else "nodes differ"


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
    """Return the color of a rank. Many ranks share one."""
    return COLORS[rank] if len(explanation.ranks) <= len(COLORS) else COLORS[0]


def _label_ranks(ax: Axes, ranks: Sequence[RankRecord]) -> None:
    ax.set_yticks(range(len(ranks)), [f"node {rank.rank}" for rank in ranks])
    ax.grid(visible=False)


def _style_panel(ax: Axes, title: str, xlabel: str, pad: float = 6.0) -> None:
    style.style_axes(ax, "x", TEXT_COLOR)
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR, pad=pad)
    ax.set_xlabel(xlabel, fontsize=8, color=MUTED_COLOR)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6))

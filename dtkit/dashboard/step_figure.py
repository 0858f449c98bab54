"""A step taken apart, as a picture: rows and losses by rank above, gradients by layer below.

The panel of losses shows the mean as areas: a bar as wide as the rank's weight and as high as its loss, and the line
of the step's loss, which makes one bar of the same area. The panel of gradients has a group of bars a layer: each
rank's own gradient, and in black the sum that all ranks hold after the all-reduce.

As in :mod:`dtkit.dashboard.figures`: no pyplot, every colour given, and no text read as mathematics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dtkit._util import formatting
from dtkit.dashboard import step_text
from dtkit.dashboard.axes import COLOURS, INK, MUTED, tidy
from dtkit.explain.data_parallel import max_or_none

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from dtkit.explain.data_parallel import LayerRecord, RankRecord, StepExplanation

_WIDTH = 11.0  # inches, as the heights
_STRIP, _STRIPS_LEAST = 0.24, 1.5
_BAR, _BARS_MOST = 0.1, 7.0  # a bar, and all of them: many layers or ranks make thinner bars
_GAP = 1.5  # between two layers, in bars
_FRAME = 2.3  # titles, legend, axis labels and the line of checksums
_POSITIONS = 600  # places along the strip of rows that can be told apart
_NARROW, _NARROWEST = 0.19, 0.045  # weights of ranks
_LOG_FROM = 100.0  # the ratio of gradients from which a linear axis would hide the small ones
_NAME = 30  # characters of a layer's name beside its bars
_LEGEND = 5  # names in a line
_SUM = "all-reduced"


def step_figure(explanation: StepExplanation) -> Figure:
    """Draw the step: rows and losses by rank, gradients by layer, checksums."""
    layers, ranks = explanation.group_layers(), explanation.ranks
    series = _series(explanation)
    upper = max(_STRIPS_LEAST, _STRIP * min(len(ranks), step_text.MAX_RANKS))
    lower = min(_BARS_MOST, _BAR * (len(series) + _GAP) * len(layers))
    figure = Figure(figsize=(_WIDTH, upper + lower + _FRAME), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        step_text.headline(explanation), x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=INK,
        parse_math=False,
    )  # fmt: skip
    grid = figure.add_gridspec(2, 2, height_ratios=(upper, lower), width_ratios=(1.45, 1))
    _draw_rows(figure.add_subplot(grid[0, 0]), explanation)
    _draw_losses(figure.add_subplot(grid[0, 1]), explanation)
    bars = figure.add_subplot(grid[1, 0])
    _draw_gradients(bars, explanation, layers, series)
    _write_columns(figure.add_subplot(grid[1, 1], sharey=bars), explanation, layers)
    figure.supxlabel(
        _checksum_line(explanation), x=0.012, ha="left", fontsize=9, fontweight="bold", parse_math=False,
        color=INK if explanation.identical else COLOURS[5],
    )  # fmt: skip
    return figure


# -- rows and losses by rank -----------------------------------------------------------------------------------------


def _draw_rows(ax: Axes, explanation: StepExplanation) -> None:
    """A strip a rank, with a mark where it took a row of the data."""
    shown = explanation.ranks[: step_text.MAX_RANKS]
    end = max((int(r.rows.max()) + 1 for r in explanation.ranks if r.rows is not None and len(r.rows)), default=1)
    _tidy(ax, "Rows of each rank", "row, in the original order")
    for k, rank in enumerate(shown):
        if rank.samples and rank.rows is not None:
            places = np.unique(rank.rows * _POSITIONS // end) * end / _POSITIONS if end > _POSITIONS else rank.rows
            ax.vlines(places, k - 0.36, k + 0.36, color=_colour(explanation, rank.rank), linewidth=1.2)
        else:
            ax.text(end / 2, k, _without_rows(rank), ha="center", va="center", fontsize=8, color=MUTED)
    ax.set(xlim=(-0.5 - 0.01 * end, end - 0.5 + 0.01 * end), ylim=(len(shown) - 0.5, -0.5))
    _name_ranks(ax, shown)
    rest = len(explanation.ranks) - len(shown)
    if rest:
        ax.set_title(f"and {formatting.plural(rest, 'more rank')}", loc="right", fontsize=8, color=MUTED)


def _without_rows(rank: RankRecord) -> str:
    if not rank.samples:
        return step_text.rows_text(rank)
    return f"{formatting.plural(rank.samples, 'sample')} {step_text.rows_text(rank)}"


def _draw_losses(ax: Axes, explanation: StepExplanation) -> None:
    """A bar a rank, as wide as its weight in the mean and as high as its loss."""
    _tidy(ax, "Loss of each rank", "weight in the mean: widths add up to 1")
    ax.grid(visible=False)
    left = 0.0
    for rank in explanation.ranks:
        if rank.loss is not None and np.isfinite(rank.loss) and rank.share:
            ax.bar(
                left, rank.loss, rank.share, align="edge", color=_colour(explanation, rank.rank), edgecolor="white",
                linewidth=1.0 if len(explanation.ranks) <= step_text.MAX_RANKS else 0.0,
            )  # fmt: skip
            _name_loss(ax, explanation, rank, left + rank.share / 2)
        left += rank.share
    ax.set_xlim(0, max(left, 1e-9))
    if np.isfinite(explanation.loss):
        ax.axhline(explanation.loss, color=INK, linewidth=1.5, linestyle=(0, (3, 1.6)))
        ax.set_title(f"of the step: {step_text.number(explanation.loss)}", loc="right", fontsize=9, color=INK)


def _name_loss(ax: Axes, explanation: StepExplanation, rank: RankRecord, middle: float) -> None:
    """Words in a rank's bar: upright in a narrow one, none where there is no room at all."""
    upright = rank.share < _NARROW
    if rank.loss is None or rank.share < _NARROWEST:
        return
    loss, share = step_text.number(rank.loss), step_text.weight(explanation, rank)
    words = f"rank {rank.rank}: {loss}" if upright else f"rank {rank.rank}\n{share} of\n{loss}"
    ax.text(
        middle, rank.loss / 2, words, ha="center", va="center", fontsize=7.5 if upright else 8, color=INK,
        rotation=90 if upright else 0, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.2},
    )  # fmt: skip


# -- gradients by layer ----------------------------------------------------------------------------------------------


def _series(explanation: StepExplanation) -> list[str]:
    """The bars of each layer, from above: a rank each (of many one for all), and the sum."""
    ranks = explanation.ranks
    own = [f"rank {r.rank}" for r in ranks] if len(ranks) <= len(COLOURS) else ["smallest to largest of the ranks"]
    return [*own, _SUM]


def _draw_gradients(
    ax: Axes, explanation: StepExplanation, layers: Sequence[LayerRecord], series: Sequence[str]
) -> None:
    unit = 1 / (len(series) + _GAP)  # a layer's group is 1 high
    many = len(explanation.ranks) > len(COLOURS)
    for k, name in enumerate(series):
        at = np.arange(len(layers)) + (k - (len(series) - 1) / 2) * unit
        if name == _SUM:
            _bars(ax, at, [max_or_none(layer.reduced) for layer in layers], unit, INK, name)
        elif many:
            _ranges(ax, at, layers, unit, name)
        else:
            _bars(ax, at, [layer.own[k] for layer in layers], unit, COLOURS[k], name)
    rows = -(-len(series) // _LEGEND)
    _tidy(ax, "Gradient of each layer: on each rank, and all-reduced", "norm of the gradient", pad=8 + 13 * rows)
    ax.set_ylim(len(layers) - 0.5, -0.5)
    ax.set_yticks(range(len(layers)), [_name(layer) for layer in layers])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    _scale(ax, layers)
    ax.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=_LEGEND, fontsize=8, frameon=False, labelcolor=INK,
        handlelength=1, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _name(layer: LayerRecord) -> str:
    name = step_text.shown_name(layer.name, _NAME)
    return name if layer.tensors == 1 else f"{name} ({step_text.shape(layer)})"


def _bars(ax: Axes, at: np.ndarray, norms: Sequence[float | None], height: float, colour: str, name: str) -> None:
    values = [norm if norm is not None and np.isfinite(norm) else 0.0 for norm in norms]
    ax.barh(at, values, height * 0.92, color=colour, label=name, gid=name)


def _ranges(ax: Axes, at: np.ndarray, layers: Sequence[LayerRecord], height: float, name: str) -> None:
    """Of many ranks: a bar from the smallest norm to the largest."""
    found = [[n for n in layer.own if n is not None and np.isfinite(n)] or [0.0] for layer in layers]
    low, high = np.array([min(norms) for norms in found]), np.array([max(norms) for norms in found])
    ax.barh(at, high - low, height * 0.92, left=low, color=COLOURS[0], label=name, gid=name)


def _scale(ax: Axes, layers: Sequence[LayerRecord]) -> None:
    """A logarithmic axis where the gradients are of very different sizes, and says so."""
    norms = np.array([n for layer in layers for n in (*layer.own, *layer.reduced) if n], float)
    norms = norms[np.isfinite(norms)]
    if len(norms) and norms.max() / norms.min() > _LOG_FROM:
        ax.set_xscale("log")
        ax.set_xlim(norms.min() / 2, norms.max() * 1.3)
        ax.set_xlabel("norm of the gradient, on a logarithmic scale", fontsize=8, color=MUTED)


def _write_columns(ax: Axes, explanation: StepExplanation, layers: Sequence[LayerRecord]) -> None:
    """Beside the bars, the numbers of the same layers."""
    columns = (
        (0.0, "all-reduced\nnorm", [_one(layer.reduced) for layer in layers]),
        (0.2, "cosine of own\nand all-reduced", [step_text.span(layer.cosine, step_text.cosine) for layer in layers]),
        (0.48, "norm of\nthe update", [_one(layer.update) for layer in layers]),
        (0.71, "checksum\nafter the step", [step_text.checksum(explanation, layer) for layer in layers]),
    )
    ax.set_axis_off()
    place = ax.get_yaxis_transform()  # across in shares of the axes, down by layer
    for x, title, cells in columns:
        ax.text(x, 1.0, title + "\n", transform=ax.transAxes, va="bottom", fontsize=8, color=MUTED, linespacing=1.2)
        for k, cell in enumerate(cells):
            colour = COLOURS[5] if "differ" in cell.lower() else INK
            ax.text(x, k, cell, transform=place, va="center", fontsize=8, color=colour)


def _one(values: Sequence[float | None]) -> str:
    """The number that all ranks should hold."""
    shown = {step_text.number(value) for value in values}
    return shown.pop() if len(shown) == 1 else "ranks differ"


def _checksum_line(explanation: StepExplanation) -> str:
    verdict = step_text.verdict(explanation)
    first = explanation.ranks[0]
    if not explanation.updated:
        return f"No update: the gradients are not finite. {verdict}"
    if explanation.identical:
        return f"Parameters {first.before} → {first.after}. {verdict}"
    return verdict


# -- common ----------------------------------------------------------------------------------------------------------


def _colour(explanation: StepExplanation, rank: int) -> str:
    """A colour a rank as long as they can be told apart."""
    return COLOURS[rank] if len(explanation.ranks) <= len(COLOURS) else COLOURS[0]


def _name_ranks(ax: Axes, ranks: Sequence[RankRecord]) -> None:
    ax.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    ax.grid(visible=False)


def _tidy(ax: Axes, title: str, xlabel: str, pad: float = 6.0) -> None:
    tidy(ax, "x", INK)
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=pad)
    ax.set_xlabel(xlabel, fontsize=8, color=MUTED)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6))

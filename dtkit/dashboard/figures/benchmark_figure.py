"""The figure of a benchmark: heat maps from rank to rank, and the matrix rate of each rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.text.benchmark_text import format_headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.planning.cost_model import Benchmark

_MAX_LABELED_RANKS = 10  # ranks up to which numbers are written into a heat map


def draw_benchmark(benchmark: Benchmark) -> Figure:
    """Draw latency and bandwidth from rank to rank, and the matrix rate of each rank."""
    figure = create_figure(11.0, 3.6)
    latency_axes, bandwidth_axes, rate_axes = figure.subplots(1, 3)
    microseconds = [[1e6 * value for value in row] for row in benchmark.latency_s]
    megabytes = [[value / 1e6 for value in row] for row in benchmark.bandwidth]
    _draw_heat_map(latency_axes, microseconds, "Latency", "µs, one way", "Oranges")
    _draw_heat_map(bandwidth_axes, megabytes, "Bandwidth", "MB/s", "Blues")
    _draw_rates(rate_axes, benchmark)
    style.set_figure_title(figure, format_headline(benchmark))
    return figure


def _draw_rates(ax: Axes, benchmark: Benchmark) -> None:
    ranks = range(benchmark.world_size)
    ax.bar(ranks, [flops / 1e9 for flops in benchmark.flops], color=style.COLORS[2], width=0.62)
    style.style_axes(ax, "y", style.TEXT_COLOR)
    style.set_title(ax, "Matrix rate", f"GFLOP/s, {benchmark.dtype}")
    ax.set_xlabel("node", fontsize=8)
    ax.set_xticks(ranks)


def _draw_heat_map(ax: Axes, values: list[list[float]], name: str, unit: str, colormap: str) -> None:
    """Draw values from rank (row) to rank (column); the diagonal is empty."""
    finite = [value for row in values for value in row if math.isfinite(value)]
    ax.set_xticks(range(len(values)))
    ax.set_yticks(range(len(values)))
    style.style_axes(ax, None, style.TEXT_COLOR)
    style.set_title(ax, name, unit)
    if not finite:
        ax.text(0.5, 0.5, "one node has no links", transform=ax.transAxes, ha="center", va="center", fontsize=9)
        return
    ax.imshow(values, cmap=colormap, vmin=0, vmax=1.15 * max(finite), interpolation="nearest")
    ax.set(xlabel="to node", ylabel="from node")
    if len(values) <= _MAX_LABELED_RANKS:
        _write_values(ax, values, max(finite))


def _write_values(ax: Axes, values: list[list[float]], largest: float) -> None:
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if math.isfinite(value):
                color = "white" if value > 0.7 * largest else "black"
                ax.text(x, y, formatting.format_rate(value), ha="center", va="center", fontsize=8, color=color)

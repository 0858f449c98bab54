"""The picture of several runs: loss against steps, and against the bytes that each rank has sent.

A run is told from the others by colour, by the dashes of its line and by its markers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.run_figure import create_figure
from dtkit.dashboard.summary.curves import LOSS, downsample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.dashboard.summary.curves import CurveBuckets
    from dtkit.history.history import History

_NUM_BUCKETS = 64  # buckets: several noisy lines over each other can't be read
_LINE_STYLES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
_MARKERS = "os^DvP*X"
_LOG_BYTES_RATIO = 20.0  # from here on the runs' bytes are so far apart that a linear axis would hide the smaller ones
_LOG_LOSS_RATIO = 50.0  # so many times smaller does a loss get before its axis is logarithmic
_LEGEND_COLUMNS = 2  # names in a row of the legend


def draw_comparison(labels: Sequence[str], histories: Sequence[History]) -> Figure:
    """Draw both panels under a legend."""
    rows = -(-len(labels) // _LEGEND_COLUMNS)
    figure = create_figure(10.8, 3.3 + 0.22 * rows)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(wspace=0.05)
    steps, sent = figure.subplots(1, 2)
    parts = [downsample(history, LOSS, max(history.ranks, default=-1) + 1, _NUM_BUCKETS) for history in histories]
    bytes_of = [_compute_sent_bytes(history, part) for history, part in zip(histories, parts, strict=True)]
    _draw_runs(steps, [part.middle_steps for part in parts], parts, labels)
    _draw_runs(sent, bytes_of, parts, labels)
    _format_steps_panel(steps, parts)
    _format_bytes_panel(sent, bytes_of)
    _scale_loss_axes((steps, sent), parts)
    handles, names = steps.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper left", ncols=_LEGEND_COLUMNS, frameon=False, fontsize=9, labelcolor=style.TEXT_COLOR,
        handlelength=4,
    )  # fmt: skip
    return figure


def _compute_sent_bytes(history: History, buckets: CurveBuckets) -> np.ndarray:
    """Bytes that one rank has sent, as the mean over the ranks, by the end of each bucket of `part`."""
    totals = history.totals()
    each = totals["sent_bytes"] / np.maximum(1, totals["ranks"])
    until = np.concatenate([[0.0], np.cumsum(each)])
    end = buckets.origin + buckets.width * (buckets.first + 1 + np.arange(len(buckets.values))) - 1
    return np.asarray(until[np.searchsorted(totals["step"], end, side="right")])


def _draw_runs(
    ax: Axes, x_values: Sequence[np.ndarray], run_buckets: Sequence[CurveBuckets], labels: Sequence[str]
) -> None:
    """A line a run, with a marker now and then; behind it the band of what its buckets hold."""
    style.style_axes(ax)
    for k, (x, part, label) in enumerate(zip(x_values, run_buckets, labels, strict=True)):
        line, colour = part.values[:, -1], style.COLORS[k % len(style.COLORS)]
        style.draw_band(ax, x, line, colour, 0.12)
        every = max(1, len(line) // 8)
        ax.plot(
            x, line[:, 1], color=colour, linewidth=1.7, label=label, gid=label, markersize=5.5,
            linestyle=_LINE_STYLES[(k + k // len(style.COLORS)) % len(_LINE_STYLES)], marker=_MARKERS[k % len(_MARKERS)],
            markerfacecolor="white", markeredgewidth=1.3, markevery=(k * every // max(1, len(labels)), every),
        )  # fmt: skip


def _format_steps_panel(ax: Axes, run_buckets: Sequence[CurveBuckets]) -> None:
    style.format_step_axis(ax)
    style.set_title(ax, "Loss against steps", "mean over all nodes")
    if not any(len(part.values) for part in run_buckets):
        style.show_placeholder(ax)


def _format_bytes_panel(ax: Axes, sent_bytes: Sequence[np.ndarray]) -> None:
    """The axis of bytes, logarithmic where the runs are far apart."""
    style.set_title(ax, "Loss against bytes", "sent by each node for synchronisation")
    ends = [float(sent[-1]) for sent in sent_bytes if len(sent) and sent[-1] > 0]
    if not ends:
        style.show_placeholder(ax, "nothing was sent")
        ax.set_xticks([])
        return
    ax.set_xlabel("bytes sent by a node", fontsize=8, color=style.MUTED_COLOR)
    if max(ends) / min(ends) >= _LOG_BYTES_RATIO:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(numticks=6))
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: formatting.format_bytes(x) if x else "0"))


def _scale_loss_axes(panels: Sequence[Axes], run_buckets: Sequence[CurveBuckets]) -> None:
    """The same scale of the loss in both panels, logarithmic where it falls far."""
    found = [part.values[:, -1, 1] for part in run_buckets]
    values = np.concatenate([line[np.isfinite(line)] for line in found]) if found else np.empty(0)
    steep = len(values) and values.min() > 0 and values.max() / values.min() >= _LOG_LOSS_RATIO
    form: Callable[[float, object], str] = lambda y, _: formatting.format_loss(y)  # noqa: E731 - matplotlib wants a function
    for ax in panels:
        if steep:
            ax.set_yscale("log")
            ax.yaxis.set_minor_locator(FixedLocator([]))
            ax.yaxis.set_major_formatter(FuncFormatter(form))

"""The picture of several runs: loss against steps, and against the bytes that each rank has sent.

A run is told from the others by colour, by the dashes of its line and by its markers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from dtkit._util import formatting
from dtkit.dashboard import axes
from dtkit.dashboard.figures import new_figure
from dtkit.dashboard.series import LOSS, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.dashboard.series import Part
    from dtkit.history.history import History

_POINTS = 64  # buckets: several noisy lines over each other can't be read
_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
_MARKERS = "os^DvP*X"
_FAR = 20.0  # from here on the runs' bytes are so far apart that a linear axis would hide the smaller ones
_STEEP = 50.0  # so many times smaller does a loss get before its axis is logarithmic
_IN_A_ROW = 2  # names in a row of the legend


def compare_figure(labels: Sequence[str], histories: Sequence[History]) -> Figure:
    """Draw both panels under a legend."""
    rows = -(-len(labels) // _IN_A_ROW)
    figure = new_figure(10.8, 3.3 + 0.22 * rows)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(wspace=0.05)
    steps, sent = figure.subplots(1, 2)
    parts = [sample(history, LOSS, max(history.ranks, default=-1) + 1, _POINTS) for history in histories]
    bytes_of = [_sent(history, part) for history, part in zip(histories, parts, strict=True)]
    _draw(steps, [part.steps for part in parts], parts, labels)
    _draw(sent, bytes_of, parts, labels)
    _finish_steps(steps, parts)
    _finish_bytes(sent, bytes_of)
    _scale_loss((steps, sent), parts)
    handles, names = steps.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper left", ncols=_IN_A_ROW, frameon=False, fontsize=9, labelcolor=axes.INK,
        handlelength=4,
    )  # fmt: skip
    return figure


def _sent(history: History, part: Part) -> np.ndarray:
    """Bytes that one rank has sent, as the mean over the ranks, by the end of each bucket of `part`."""
    totals = history.totals()
    each = totals["sent_bytes"] / np.maximum(1, totals["ranks"])
    until = np.concatenate([[0.0], np.cumsum(each)])
    end = part.origin + part.width * (part.first + 1 + np.arange(len(part.values))) - 1
    return np.asarray(until[np.searchsorted(totals["step"], end, side="right")])


def _draw(ax: Axes, along: Sequence[np.ndarray], parts: Sequence[Part], labels: Sequence[str]) -> None:
    """A line a run, with a marker now and then; behind it the band of what its buckets hold."""
    axes.tidy(ax)
    for k, (x, part, label) in enumerate(zip(along, parts, labels, strict=True)):
        line, colour = part.values[:, -1], axes.COLOURS[k % len(axes.COLOURS)]
        axes.draw_band(ax, x, line, colour, 0.12)
        every = max(1, len(line) // 8)
        ax.plot(
            x, line[:, 1], color=colour, linewidth=1.7, label=label, gid=label, markersize=5.5,
            linestyle=_DASHES[(k + k // len(axes.COLOURS)) % len(_DASHES)], marker=_MARKERS[k % len(_MARKERS)],
            markerfacecolor="white", markeredgewidth=1.3, markevery=(k * every // max(1, len(labels)), every),
        )  # fmt: skip


def _finish_steps(ax: Axes, parts: Sequence[Part]) -> None:
    axes.step_axis(ax)
    axes.title(ax, "Loss against steps", "mean over all nodes")
    if not any(len(part.values) for part in parts):
        axes.nothing(ax)


def _finish_bytes(ax: Axes, bytes_of: Sequence[np.ndarray]) -> None:
    """The axis of bytes, logarithmic where the runs are far apart."""
    axes.title(ax, "Loss against bytes", "sent by each node for synchronisation")
    ends = [float(sent[-1]) for sent in bytes_of if len(sent) and sent[-1] > 0]
    if not ends:
        axes.nothing(ax, "nothing was sent")
        ax.set_xticks([])
        return
    ax.set_xlabel("bytes sent by a node", fontsize=8, color=axes.MUTED)
    if max(ends) / min(ends) >= _FAR:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(numticks=6))
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: formatting.size(x) if x else "0"))


def _scale_loss(panels: Sequence[Axes], parts: Sequence[Part]) -> None:
    """The same scale of the loss in both panels, logarithmic where it falls far."""
    found = [part.values[:, -1, 1] for part in parts]
    values = np.concatenate([line[np.isfinite(line)] for line in found]) if found else np.empty(0)
    steep = len(values) and values.min() > 0 and values.max() / values.min() >= _STEEP
    form: Callable[[float, object], str] = lambda y, _: formatting.loss(y)  # noqa: E731 - matplotlib wants a function
    for ax in panels:
        if steep:
            ax.set_yscale("log")
            ax.yaxis.set_minor_locator(FixedLocator([]))
            ax.yaxis.set_major_formatter(FuncFormatter(form))

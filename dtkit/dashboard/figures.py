"""The kept picture: matplotlib figures of a run, drawn from the same curves as the live view.

A panel is one function that draws on an ``Axes`` from a ``History``; :func:`run_figure` lays panels out
under a title. Only ``Figure`` and the Agg canvas are used, never pyplot: pictures are drawn on other
threads than the user's. Every colour is given, so a notebook's matplotlib style can't make text vanish on
our white.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dtkit import units
from dtkit.dashboard.feed import MARKED
from dtkit.dashboard.series import LOSS, MAX_LINES, THROUGHPUT, Part, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from dtkit.dashboard.source import Source
    from dtkit.history import History
    from dtkit.records import Event

    Panel = Callable[[Axes, History], None]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A8A00", "#6F58B5")
"""Okabe and Ito's palette, its yellow darkened to be seen on white, and violet: one a node."""
INK, MUTED, GRID = "#1a1a1a", "#5f5f5f", "#e4e4e4"
MARK_GLYPH = {"pause": "‖", "resume": "▶", "lr": "lr", "error": "✕", "stop": "■"}
_LABEL_GAP = 0.062  # of the axes' height: two labels closer than that would overlap
_DPI = 160
_SMOOTH = 64  # points of the throughput: single steps of a few milliseconds say more of the scheduler than of training
_MANY_POINTS = 20  # more validation points than this are drawn smaller: a chain of large ones would hide the lines


def run_figure(source: Source, panels: Sequence[Panel] | None = None) -> Figure:
    """Draw a run as it stands: a title line, and `panels` side by side (loss and throughput by default)."""
    panels = panels or (draw_loss, draw_throughput)
    figure = Figure(figsize=(5.4 * len(panels), 3.5), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    _title(figure, source)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, source.history)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG, sharp on a dense screen; :func:`width` tells how wide to show it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, facecolor="white")
    return file.getvalue()


def width(figure: Figure) -> int:
    """The figure's width in CSS pixels."""
    return round(figure.get_figwidth() * 92)


def draw_loss(ax: Axes, history: History) -> None:
    """Loss per node and over all nodes, with the validation points."""
    ranks = max(history.ranks, default=-1) + 1
    _draw_lines(ax, sample(history, LOSS, ranks), ranks, "mean")
    _title_panel(ax, "Loss", ranks)
    points = [(e.step, e.values["loss"]) for e in history.evaluations if "loss" in e.values]
    points = [(step, value) for step, value in points if np.isfinite(value)]
    if points:
        size = 3 if len(points) > _MANY_POINTS else 5
        ax.plot(*zip(*points, strict=True), "D", color=INK, markerfacecolor="white", markersize=size, gid="valid")
        _end_labels(ax, [*_labels_of(ax), ("valid", points[-1][1], INK)])
    _mark_events(ax, history.events)


def draw_throughput(ax: Axes, history: History) -> None:
    """Samples per second per node, and of all nodes together divided by their number."""
    ranks = max(history.ranks, default=-1) + 1
    part = sample(history, THROUGHPUT, ranks, _SMOOTH)
    _draw_lines(ax, part, ranks, f"all ÷ {ranks}")
    _title_panel(ax, "Throughput", ranks, "samples/s ")
    if np.isfinite(part.values).any():
        ax.set_ylim(0, 1.08 * float(np.nanmax(part.values)))
        _end_labels(ax, _labels_of(ax))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: units.rate(y) if y else "0"))
    _mark_events(ax, history.events)


def _title(figure: Figure, source: Source) -> None:
    """One line: what, how, how far."""
    spec, status = source.spec, source.status
    text = " · ".join(
        (
            units.plain(spec.name, 40),
            units.plain(spec.strategy, 60),
            units.plural(spec.world_size, "node"),
            status.state.value,
            f"{status.step:,} of {status.steps:,} steps",
        )
    )
    figure.suptitle(text, x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=INK, parse_math=False)


def _draw_lines(ax: Axes, part: Part, ranks: int, overall: str) -> None:
    """A line a node, or one band for many; over them the line of all nodes, dashed."""
    _tidy(ax)
    if not len(part.values):
        ax.text(0.5, 0.5, "no step yet", transform=ax.transAxes, ha="center", va="center", color=MUTED)
        return
    last = part.origin + part.width * len(part.values) - 1
    ax.set_xlim(part.origin, max(part.origin + 1, last))
    values = part.values[:, 0]
    banded = ranks > MAX_LINES
    for k in range(values.shape[1] - 1):
        if banded:
            _draw_band(ax, part.steps, values[:, k], COLOURS[4], 0.3)
        else:
            # Many faint bands over each other would hide the lines: they share what one may cover.
            _draw_band(ax, part.steps, values[:, k], COLOURS[k], 0.32 / (ranks + 1))
            _draw_line(ax, part.steps, values[:, k], f"node {k}", color=COLOURS[k], linewidth=1.3)
    if ranks > 1:
        _draw_line(ax, part.steps, values[:, -1], overall, color=INK, linewidth=1.5, linestyle=(0, (3, 1.6)))
    if np.isfinite(values).any():
        _end_labels(ax, _labels_of(ax))


def _draw_band(ax: Axes, steps: np.ndarray, line: np.ndarray, colour: str, alpha: float) -> None:
    """From the smallest to the largest of each bucket, where they differ."""
    if np.nanmax(line[:, 2] - line[:, 0], initial=0) > 0:
        ax.fill_between(steps, line[:, 0], line[:, 2], color=colour, alpha=alpha, linewidth=0)


def _draw_line(ax: Axes, steps: np.ndarray, line: np.ndarray, label: str, **style: Any) -> None:
    """The mean of each bucket; dots where there are too few for a line."""
    marker = "o" if np.isfinite(line[:, 1]).sum() < 3 else ""
    ax.plot(steps, line[:, 1], marker=marker, markersize=4, label=label, gid=label, **style)


def _labels_of(ax: Axes) -> list[tuple[str, float, str]]:
    """(text, height, colour) for the end of each labelled line."""
    found = []
    for line in ax.get_lines():
        text, y = str(line.get_label()), np.asarray(line.get_ydata(), float)
        y = y[np.isfinite(y)]
        if len(y) and not text.startswith("_"):
            found.append((text, float(y[-1]), str(line.get_color())))
    return found


def _end_labels(ax: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Write each line's name at its end, in its colour, pushed apart where they would overlap."""
    for old in [t for t in ax.texts if t.get_gid() == "end"]:
        old.remove()
    low, high = ax.get_ylim()
    ordered = sorted(labels, key=lambda label: label[1])
    wanted = [(y - low) / (high - low) for _, y, _ in ordered]
    for (text, _, colour), y in zip(ordered, spread(wanted, _LABEL_GAP), strict=True):
        ax.annotate(
            text, (1.012, y), xycoords="axes fraction", va="center", fontsize=8, fontweight="bold",
            color=colour, gid="end", annotation_clip=False,
        )  # fmt: skip


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending positions moved apart to `gap`, each crowd around its own middle, kept within 0 and 1."""
    crowds: list[tuple[float, int]] = []  # (middle, how many)
    for y in wanted:
        middle, count = y, 1
        while crowds and middle - crowds[-1][0] < gap * (count + crowds[-1][1]) / 2:
            other, others = crowds.pop()
            middle = (middle * count + other * others) / (count + others)
            count += others
        half = gap * (count - 1) / 2
        crowds.append((max(half, min(1 - half, middle)), count))
    return [middle + gap * (k - (count - 1) / 2) for middle, count in crowds for k in range(count)]


def _mark_events(ax: Axes, events: Sequence[Event]) -> None:
    """A thin line and a glyph on the step axis for what happened there."""
    left, right = ax.get_xlim()
    free = left
    for event in [event for event in events if event.kind in MARKED][-20:]:
        colour = COLOURS[5] if event.kind == "error" else MUTED
        ax.axvline(event.step, color=colour, linewidth=0.8, linestyle=":", gid=f"event-{event.kind}")
        if event.step < free:
            continue  # its glyph would lie on the one before
        free = event.step + 0.025 * (right - left)
        ax.annotate(
            MARK_GLYPH.get(event.kind, "•"), (event.step, 1.0), xycoords=("data", "axes fraction"), va="top",
            ha="center", fontsize=7, color=colour, annotation_clip=True,
        )  # fmt: skip


def _tidy(ax: Axes) -> None:
    """Light axes: two spines, a horizontal grid, whole steps."""
    ax.set_facecolor("white")
    ax.grid(visible=True, axis="y", color=GRID, linewidth=0.8, linestyle="-")
    ax.grid(visible=False, axis="x")
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    ax.tick_params(colors=MUTED, labelcolor=MUTED, labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.set_xlabel("step", fontsize=8, color=MUTED)


def _title_panel(ax: Axes, name: str, ranks: int, unit: str = "") -> None:
    """The panel's name, and what its lines are."""
    many = "all nodes, band from lowest to highest node" if ranks > MAX_LINES else "per node and all"
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_title(unit + many if ranks > 1 else unit, loc="right", fontsize=8, color=MUTED)

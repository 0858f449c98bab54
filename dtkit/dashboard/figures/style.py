"""How kept pictures look: colours, light axes, lines with their names at the end, marks of events.

Colours are Okabe and Ito's; nothing is told apart by colour alone. Every colour is given, so a notebook's matplotlib
style can't make text vanish on our white. All of this works on an ``Axes``, whoever made it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from dtkit.dashboard.live.messages import MARKED_EVENTS
from dtkit.dashboard.summary.timing import format_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    from dtkit.dashboard.summary.curves import ChartLayout, CurveBuckets
    from dtkit.types import Event

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A8A00", "#6F58B5")
"""Okabe and Ito's palette, its yellow darkened to be seen on white, and violet: one a node."""
TEXT_COLOR, MUTED_COLOR, GRID_COLOR, ALERT_COLOR = "#1a1a1a", "#5f5f5f", "#e4e4e4", "#b84a00"
EVENT_GLYPHS = {
    "pause": "‖", "resume": "▶", "lr": "lr", "error": "✕", "stop": "■", "lost": "†", "repair": "+", "save": "↓",
    "stuck": "⊘",
}  # fmt: skip
_EVENT_WORDS = {
    "pause": "paused", "resume": "resumed", "lr": "new learning rate", "error": "error", "stop": "stopped",
    "lost": "lost", "repair": "repaired", "save": "saved", "stuck": "stuck",
}  # fmt: skip
_URGENT_EVENTS = ("error", "lost", "stuck")
_OUTLIER_COLORS = (5, 6, 3, 2)  # colours that the band's blue does not swallow
_NARROW_WIDTH_IN = 7.5  # inches: below that a legend is broken
_MAX_LEGEND_ROW_ENTRIES = 10  # entries of a legend that have room next to each other
_MIN_LABEL_GAP = 0.062  # of the axes' height: two labels closer than that would overlap


def style_axes(ax: Axes, grid: Literal["x", "y"] | None = "y", label_color: str = MUTED_COLOR) -> None:
    """Light axes: two spines, and a grid along the numbers."""
    ax.set_facecolor("white")
    ax.grid(visible=False)
    if grid is not None:
        ax.grid(visible=True, axis=grid, color=GRID_COLOR, linewidth=0.8, linestyle="-")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED_COLOR)
    ax.tick_params(colors=MUTED_COLOR, labelcolor=label_color, labelsize=8)


def format_step_axis(ax: Axes) -> None:
    """Whole steps along the bottom."""
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.set_xlabel("step", fontsize=8, color=MUTED_COLOR)


def set_title(ax: Axes, name: str, note: str = "") -> None:
    """The panel's name, and what is shown."""
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR)
    ax.set_title(note, loc="right", fontsize=8, color=MUTED_COLOR)


def show_placeholder(ax: Axes, text: str = "no step yet") -> None:
    """Say why there is nothing to see."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED_COLOR)


def draw_lines(ax: Axes, buckets: CurveBuckets, layout: ChartLayout, overall_label: str) -> None:
    """A line a node that has values, or one band for many; over them the line of all nodes, dashed."""
    style_axes(ax)
    format_step_axis(ax)
    if not np.isfinite(buckets.values).any():
        show_placeholder(ax, "no step yet" if not len(buckets.values) else "nothing that could be drawn")
        return
    last = buckets.origin + buckets.width * len(buckets.values) - 1
    ax.set_xlim(buckets.origin, max(buckets.origin + 1, last))
    for k in range(layout.nodes):
        if layout.banded:
            draw_band(ax, buckets.middle_steps, buckets.values[:, k], COLORS[4], 0.3)
        elif np.isfinite(buckets.values[:, k, 1]).any():  # the first stages of a pipeline have no loss
            # Many faint bands over each other would hide the lines: they share what one may cover.
            draw_band(ax, buckets.middle_steps, buckets.values[:, k], COLORS[k], 0.32 / (layout.nodes + 1))
            _draw_line(ax, buckets.middle_steps, buckets.values[:, k], f"node {k}", color=COLORS[k], linewidth=1.3)
    if layout.nodes != 1 or layout.banded:
        dashes = (0, (3, 1.6)) if layout.nodes else "-"
        _draw_line(
            ax,
            buckets.middle_steps,
            buckets.values[:, -1],
            overall_label,
            color=TEXT_COLOR,
            linewidth=1.5,
            linestyle=dashes,
        )
    draw_end_labels(ax, collect_line_labels(ax))


def draw_band(ax: Axes, steps: np.ndarray, values: np.ndarray, color: str, alpha: float) -> None:
    """From the smallest to the largest of each bucket, where they differ."""
    if np.nanmax(values[:, 2] - values[:, 0], initial=0) > 0:
        ax.fill_between(steps, values[:, 0], values[:, 2], color=color, alpha=alpha, linewidth=0)


def _draw_line(ax: Axes, steps: np.ndarray, values: np.ndarray, label: str, **style: Any) -> None:
    """The mean of each bucket; dots where there are too few for a line."""
    marker = "o" if np.isfinite(values[:, 1]).sum() < 3 else ""
    ax.plot(steps, values[:, 1], marker=marker, markersize=4, label=label, gid=label, **style)


def collect_line_labels(ax: Axes) -> list[tuple[str, float, str]]:
    """(text, height, colour) for the end of each labelled line."""
    found = []
    for line in ax.get_lines():
        text, y = str(line.get_label()), np.asarray(line.get_ydata(), float)
        y = y[np.isfinite(y)]
        if len(y) and not text.startswith("_"):
            found.append((text, float(y[-1]), str(line.get_color())))
    return found


def draw_end_labels(ax: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Write each line's name at its end, in its colour, pushed apart where they would overlap."""
    for old in [t for t in ax.texts if t.get_gid() == "end"]:
        old.remove()
    low, high = ax.get_ylim()
    ordered = sorted(labels, key=lambda label: label[1])
    wanted = [(y - low) / (high - low) for _, y, _ in ordered]
    for (text, _, colour), y in zip(ordered, spread_positions(wanted, _MIN_LABEL_GAP), strict=True):
        ax.annotate(
            text, (1.012, y), xycoords="axes fraction", va="center", fontsize=8, fontweight="bold",
            color=colour, gid="end", annotation_clip=False,
        )  # fmt: skip


def spread_positions(positions: Sequence[float], gap: float) -> list[float]:
    """Ascending positions moved apart to `gap`, each crowd around its own middle, kept within 0 and 1."""
    crowds: list[tuple[float, int]] = []  # (middle, how many)
    for y in positions:
        middle, count = y, 1
        while crowds and middle - crowds[-1][0] < gap * (count + crowds[-1][1]) / 2:
            other, others = crowds.pop()
            middle = (middle * count + other * others) / (count + others)
            count += others
        half = gap * (count - 1) / 2
        crowds.append((max(half, min(1 - half, middle)), count))
    return [middle + gap * (k - (count - 1) / 2) for middle, count in crowds for k in range(count)]


def draw_outlier_lines(ax: Axes, buckets: CurveBuckets, ranks: Sequence[int], lost_ranks: Collection[int]) -> None:
    """Over the band of many nodes a line for each of a few, told apart by dashes as well."""
    for k, rank in enumerate(ranks):
        name = f"{'✕' if rank in lost_ranks else '▲'} node {rank}"
        colour, dashes = (
            COLORS[_OUTLIER_COLORS[k % 4]],
            ("-", (0, (6, 1.6)), (0, (1.6, 1.6)), (0, (6, 1.6, 1.6, 1.6)))[k % 4],
        )
        _draw_line(ax, buckets.middle_steps, buckets.values[:, k], name, color=colour, linewidth=1.2, linestyle=dashes)
    draw_end_labels(ax, collect_line_labels(ax))


def count_legend_columns(num_entries: int) -> int:
    """Of a legend across the whole figure: one row, or two of equal length."""
    return num_entries if num_entries <= _MAX_LEGEND_ROW_ENTRIES else -(-num_entries // 2)


def draw_legend_below(ax: Axes, patches: Sequence[Patch]) -> None:
    """What the looks of a panel of bars mean, below the axis' name; in rows where it is narrow or they are many."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    narrow = ax.get_position().width * figure.get_figwidth() < _NARROW_WIDTH_IN
    below = ScaledTranslation(0, -0.42, figure.dpi_scale_trans)  # inches, whatever the height of the axes
    ax.legend(
        handles=list(patches),
        loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=ax.transAxes + below, frameon=False, fontsize=8,
        ncols=4 if narrow else count_legend_columns(len(patches)), labelcolor=TEXT_COLOR, handlelength=1.8, handleheight=1.0,
        columnspacing=1.6, borderaxespad=0, borderpad=0,
    )  # fmt: skip


def mark_events(ax: Axes, events: Sequence[Event]) -> None:
    """A thin line and a glyph on the step axis for what happened there."""
    left, right = ax.get_xlim()
    free = left
    for event in [event for event in events if event.kind in MARKED_EVENTS][-20:]:
        colour = COLORS[5] if event.kind in _URGENT_EVENTS else MUTED_COLOR
        ax.axvline(event.step, 0, 0.94, color=colour, linewidth=0.8, linestyle=":", gid=f"event-{event.kind}")
        if event.step < free:
            continue  # its glyph would lie on the one before
        free = event.step + 0.025 * (right - left)
        ax.annotate(
            EVENT_GLYPHS.get(event.kind, "•"), (event.step, 1.0), xycoords=("data", "axes fraction"), va="top",
            ha="center", fontsize=8, color=colour, annotation_clip=True,
        )  # fmt: skip


def describe_event_marks(events: Sequence[Event]) -> str:
    """What the marks mean that these events have, and of which nodes they are; empty where there is none."""
    of: dict[str, set[int]] = {}
    for event in events:
        if event.kind in MARKED_EVENTS:
            of.setdefault(event.kind, set()).update(() if event.rank is None else {event.rank})
    who = {kind: f"{format_nodes(sorted(ranks))} " if ranks else "" for kind, ranks in of.items()}
    return "   ".join(f"{EVENT_GLYPHS[kind]} {who[kind]}{_EVENT_WORDS[kind]}" for kind in of)


def get_last_value(buckets: CurveBuckets) -> float:
    """The last number of the line over all ranks; NaN where there is none."""
    line = buckets.values[:, -1, 1]
    known = line[np.isfinite(line)]
    return float(known[-1]) if len(known) else np.nan


def describe_lines(layout: ChartLayout, unit: str = "") -> str:
    """What the lines are, for the corner of the panel."""
    many = "mean and range of nodes" if layout.banded else "per node and all"
    return f"{unit}, {many}".removeprefix(", ") if layout.banded or layout.nodes > 1 else unit

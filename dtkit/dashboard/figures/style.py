"""The style of figures: colors, light axes, and lines with labels at their ends.

The colors are Okabe and Ito's, and nothing is distinguished by color alone. Every color is set, so that a notebook's
matplotlib style can't make text vanish on the white background.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation

from dtkit._util import formatting
from dtkit.dashboard.summary.curves import MAX_NODE_LINES, Curves
from dtkit.dashboard.summary.metrics import compute_run_metrics
from dtkit.dashboard.summary.outliers import find_outliers
from dtkit.dashboard.summary.ticks import choose_log_ticks, choose_time_ticks
from dtkit.dashboard.summary.value_scale import find_log_floor, spans_orders

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from dtkit.dashboard.summary.curves import Chart, ChartLayout, CurveBuckets
    from dtkit.history.history import History

COLORS = ("#0072B2", "#C27F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A8A00", "#6F58B5")
"""A color for each node: Okabe and Ito's palette with a yellow dark enough for white, and violet."""
PART_LINE: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.7}  # of a node, below the mean, which is read first
MEAN_LINE: dict[str, Any] = {"linewidth": 1.8}
TEXT_COLOR, MUTED_COLOR, GRID_COLOR, ALERT_COLOR = "#1a1a1a", "#5f5f5f", "#e4e4e4", "#b84a00"
_OUTLIER_COLORS = (5, 6, 3, 2)  # indices of colors that stand out from the band's blue
_OUTLIER_DASHES = ("-", (0, (6, 1.6)), (0, (1.6, 1.6)), (0, (6, 1.6, 1.6, 1.6)))
_NARROW_WIDTH_IN = 7.5  # below this width a legend has several rows
_MAX_LEGEND_ROW_ENTRIES = 10
_MIN_LABEL_GAP = 0.062  # of the axes' height; closer labels would overlap
_FIGURE_EDGE = 0.985  # of its width
_LABEL_LEADING = 1.12  # of a label's height
_NUMBERS_HEIGHT_IN = 0.22  # of the numbers below an axis, with their distance to it
_TITLE_CHARS_PER_INCH = 10  # of a bold headline
_NOTE_CHARS_PER_INCH = 12.5  # of a bold sentence below a figure
SMALL_FONT_SIZE = 8
_SMALL_TEXT: dict[str, Any] = {"fontsize": SMALL_FONT_SIZE, "color": MUTED_COLOR}


def style_axes(ax: Axes, grid: Literal["x", "y"] | None = "y", label_color: str = MUTED_COLOR) -> None:
    """Style axes with two spines, and a grid along the numbers."""
    ax.set_facecolor("white")
    ax.grid(visible=False)
    if grid is not None:
        ax.grid(visible=True, axis=grid, color=GRID_COLOR, linewidth=0.8, linestyle="-")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED_COLOR)
    ax.tick_params(colors=MUTED_COLOR, labelcolor=label_color, labelsize=SMALL_FONT_SIZE)


def format_value_axis(axis: Axis) -> None:
    """Format a linear axis of losses, metrics or other numbers."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: formatting.format_tick(value)))


def format_step_axis(ax: Axes) -> None:
    """Format the axes of values over whole steps."""
    format_value_axis(ax.yaxis)
    # More numbers would touch in a narrow panel.
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.set_xlabel("step", **_SMALL_TEXT)


def show_all_steps(ax: Axes, history: History) -> None:
    """Let the axis have the steps of the run, so that the same step is at the same place in all panels."""
    steps = history.totals()["step"]
    if len(steps):
        first, last = min(float(steps.min()), ax.dataLim.x0), max(float(steps.max()), ax.dataLim.x1)
        ax.set_xlim(first, max(first + 1, last))


class _TickLocator(Locator):
    """Places the ticks that a function of the lower and the upper limit returns."""

    def __init__(self, choose: Callable[[float, float], list[float]]) -> None:
        self._choose = choose

    def __call__(self) -> list[float]:
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        return self._choose(min(vmin, vmax), max(vmin, vmax))


def _choose_positive_ticks(low: float, high: float) -> list[float]:
    """Return at least two round numbers, also within one decade, where matplotlib may place one."""
    return choose_log_ticks(low, high) if low > 0 else []


def format_time_axis(axis: Axis) -> None:
    """Format an axis of seconds."""
    axis.set_major_locator(_TickLocator(choose_time_ticks))
    axis.set_major_formatter(FuncFormatter(lambda seconds, _: formatting.format_time_tick(seconds)))


def format_log_axis(axis: Axis, format_value: Callable[[float], str]) -> None:
    """Format an axis that has a logarithmic scale."""
    axis.set_major_locator(_TickLocator(_choose_positive_ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: formatting.shorten_tick(format_value(value))))


def set_title(ax: Axes, name: str, note: str = "", pad: float | None = None) -> None:
    """Set a panel's name on the left and a note on the right, `pad` points above the axes."""
    ax.set_title(name, loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR, gid="name", pad=pad)
    ax.set_title(note, loc="right", gid="note", pad=pad, **_SMALL_TEXT)


def fit_texts(figure: Figure) -> None:
    """Shorten notes and names of panels that would overlap, and move labels of lines apart. Lays the figure out."""
    lay_out(figure)
    has_changed = False
    for ax in figure.axes:
        titles = {text.get_gid(): text for text in ax.findobj(Text)}
        before = _list_titles(titles)
        _fit_titles(ax, titles, 0.08 * figure.dpi)
        has_changed |= _list_titles(titles) != before
    if has_changed:
        lay_out(figure)  # shorter names changed the room
    for ax in figure.axes:
        labels = [text for text in ax.texts if text.get_gid() == "end" and isinstance(text, Annotation)]
        _spread_end_labels(ax, labels)


def lay_out(figure: Figure) -> None:
    """Let the figure's engine place the axes, without the time for a drawing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)


def _list_titles(titles: Mapping[str | None, Text]) -> list[tuple[str, tuple[float, float]]]:
    return [(titles[key].get_text(), titles[key].get_position()) for key in ("name", "note") if key in titles]


def _fit_titles(ax: Axes, titles: Mapping[str | None, Text], gap: float) -> None:
    name, note = titles.get("name"), titles.get("note")
    if name is None or note is None:
        return
    axes_box = ax.get_window_extent()
    right = max([axes_box.x1, _find_free_edge(ax)])
    if name.get_window_extent().x1 + gap > note.get_window_extent().x0:
        note.set_x((right - axes_box.x0) / axes_box.width)  # above the names of the lines
    while note.get_text() and name.get_window_extent().x1 + gap > note.get_window_extent().x0:
        text = note.get_text()
        note.set_text(text[: max(text.rfind(", "), text.rfind(": "), 0)])
    right = max(right, _find_next_name(ax) - gap)  # a note that is left doesn't touch the name
    room = (right - name.get_window_extent().x0) / max(1.0, name.get_window_extent().width)
    if room < 1:
        share = max(0.8, 0.98 * room)  # down to the size of notes; the width isn't quite proportional to it
        name.set_fontsize(share * float(name.get_fontsize()))
        if room < share:
            name.set_text(formatting.sanitize_text(name.get_text(), int(room / share * len(name.get_text()))))


def _find_free_edge(ax: Axes) -> float:
    """Return where the room beside axes ends: at the figure's edge, or after the names of the lines."""
    place, figure = ax.get_subplotspec(), ax.get_figure(root=True)
    if place is not None and place.is_last_col() and figure is not None:
        return float(_FIGURE_EDGE * figure.bbox.width)
    return max((text.get_window_extent().x1 for text in ax.texts if text.get_gid() == "end"), default=0.0)


def _find_next_name(ax: Axes) -> float:
    """Return where the name of the next panel in the row begins; 0 in the last column."""
    place, figure = ax.get_subplotspec(), ax.get_figure(root=True)
    if place is None or figure is None or place.is_last_col():
        return 0.0
    places = [(other, other.get_subplotspec()) for other in figure.axes]
    right = [o for o, p in places if p and p.rowspan == place.rowspan and p.colspan.start >= place.colspan.stop]
    return min((other.get_window_extent().x0 for other in right), default=0.0)


def _spread_end_labels(ax: Axes, labels: Sequence[Annotation]) -> None:
    """Move labels apart, and below the upper end of the axes, where the note would touch them."""
    if not labels:
        return
    height = max(label.get_window_extent().height for label in labels) / ax.get_window_extent().height
    top = 1 - min(0.5, height / 2)
    ordered = sorted(labels, key=lambda label: label.xy[1])
    heights = spread_positions([label.xy[1] / top for label in ordered], _LABEL_LEADING * height / top)
    for label, y in zip(ordered, heights, strict=True):
        label.xy = label.xyann = (label.xy[0], top * y)  # the text is at the second


def set_figure_title(figure: Figure, text: str) -> None:
    """Set a headline of any length above a figure."""
    text = textwrap.fill(text, int(_TITLE_CHARS_PER_INCH * figure.get_figwidth()))
    figure.suptitle(text, x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=TEXT_COLOR, parse_math=False)


def set_figure_note(figure: Figure, text: str, color: str = TEXT_COLOR) -> None:
    """Set a sentence below a figure."""
    text = textwrap.fill(text, int(_NOTE_CHARS_PER_INCH * figure.get_figwidth()))
    figure.supxlabel(text, x=0.012, ha="left", fontsize=9, fontweight="bold", color=color, parse_math=False)


def write_beside(ax: Axes, text: str, x: float, y: float, **text_style: Any) -> None:
    """Write text to the right of a bar's end."""
    defaults: dict[str, Any] = {"fontsize": 8, "color": TEXT_COLOR, "va": "center"}
    ax.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", **(defaults | text_style))


def format_bar_axis(ax: Axes, legend_columns: int, fontsize: float, unit: str = "") -> None:
    """Format the x axis of horizontal bars: numbers with their unit, and a legend below it."""
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))  # more numbers with units would touch
    ax.xaxis.set_major_formatter(StrMethodFormatter(f"{{x:,g}} {unit}".rstrip()))
    below_numbers = ax.transAxes + ScaledTranslation(0, -_NUMBERS_HEIGHT_IN, ax.figure.dpi_scale_trans)
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below_numbers, ncols=legend_columns,
        fontsize=fontsize, frameon=False,
    )  # fmt: skip


def show_placeholder(ax: Axes, text: str = "no step yet") -> None:
    """Write a reason into axes that have nothing to show."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED_COLOR)


def draw_lines(
    ax: Axes, buckets: CurveBuckets, layout: ChartLayout, overall_name: str, *, name_is_noted: bool = False
) -> None:
    """Draw pale lines of nodes below their mean, or one band for many nodes; a line that is no mean is dashed.

    Each line ends with its name, and the line over all too unless the panel's note has it: a long name at the end would
    take the width from the lines.
    """
    style_axes(ax)
    format_step_axis(ax)
    if not np.isfinite(buckets.values).any():
        show_placeholder(ax, "no step yet" if not len(buckets.values) else "nothing that could be drawn")
        return
    last = buckets.origin + buckets.width * len(buckets.values) - 1
    ax.set_xlim(buckets.origin, max(buckets.origin + 1, last))
    own = PART_LINE if layout.has_mean and layout.nodes > 1 else {"linewidth": 1.3}
    for k in range(layout.nodes):
        if layout.banded:
            draw_band(ax, buckets.middle_steps, buckets.values[:, k], COLORS[4], 0.3)
        elif np.isfinite(buckets.values[:, k, 1]).any():  # only the last stage of a pipeline has a loss
            # Overlapping bands would hide the lines, so they share the opacity of one.
            draw_band(ax, buckets.middle_steps, buckets.values[:, k], COLORS[k], 0.32 / (layout.nodes + 1))
            label = f"node {k}" if layout.nodes > 1 else "_"
            _draw_line(ax, buckets.middle_steps, buckets.values[:, k], f"node {k}", label, color=COLORS[k], **own)
    if layout.nodes != 1 or layout.banded:
        look = MEAN_LINE if layout.has_mean or not layout.nodes else {"linewidth": 1.5, "linestyle": (0, (3, 1.6))}
        end = "_" if name_is_noted else overall_name
        _draw_line(ax, buckets.middle_steps, buckets.values[:, -1], overall_name, end, color=TEXT_COLOR, **look)
    draw_end_labels(ax, collect_line_labels(ax))


def scale_by_span(ax: Axes, buckets: CurveBuckets) -> None:
    """Make an axis logarithmic where the values of its lines span many orders, as the live view does."""
    if spans_orders(buckets.values[:, -1]):
        ax.set_yscale("log")
        format_log_axis(ax.yaxis, formatting.format_loss)
        draw_end_labels(ax, collect_line_labels(ax))


def leave_out_single_small_values(ax: Axes, lines: Iterable[np.ndarray]) -> None:
    """End a logarithmic axis a little below the lowest part of its lines, all of which were drawn."""
    floor = find_log_floor(lines) if ax.get_yscale() == "log" else None
    if floor is not None and floor > ax.get_ylim()[0]:
        ax.set_ylim(bottom=floor)
        draw_end_labels(ax, collect_line_labels(ax))


def draw_band(ax: Axes, steps: np.ndarray, values: np.ndarray, color: str, alpha: float) -> None:
    """Draw a band from the smallest to the largest value of each bucket, where they differ."""
    if np.nanmax(values[:, 2] - values[:, 0], initial=0) > 0:
        ax.fill_between(steps, values[:, 0], values[:, 2], color=color, alpha=alpha, linewidth=0)


def _draw_line(ax: Axes, steps: np.ndarray, values: np.ndarray, name: str, label: str, **style: Any) -> None:
    """Draw the mean of each bucket, with a gap where it is unknown, and dots where there are too few for a line.

    `label` is written at the line's end; "_" for none.
    """
    known = np.isfinite(values[:, 1])
    neighbors = np.pad(known, 1)
    alone = known if known.sum() < 3 else known & ~neighbors[:-2] & ~neighbors[2:]
    ax.plot(
        steps, values[:, 1], marker="o", markersize=4, markevery=[int(k) for k in np.flatnonzero(alone)], label=label,
        gid=name, **style,
    )  # fmt: skip


def collect_line_labels(ax: Axes) -> list[tuple[str, float, str]]:
    """Return (text, height, color) for the end of each labeled line."""
    labels = []
    for line in ax.get_lines():
        text, y = str(line.get_label()), np.asarray(line.get_ydata(), float)
        y = y[np.isfinite(y)]
        if len(y) and not text.startswith("_"):
            labels.append((text, float(y[-1]), str(line.get_color())))
    return labels


def draw_end_labels(ax: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Write each line's name at its end, in its color, and apart from the other names."""
    for old in [t for t in ax.texts if t.get_gid() == "end"]:
        old.remove()
    scale = ax.yaxis.get_transform().transform  # of a logarithmic axis, the logarithm
    ordered = sorted(labels, key=lambda label: label[1])
    low, *known, high = scale(np.array([ax.get_ylim()[0], *(y for _, y, _ in ordered), ax.get_ylim()[1]]))
    heights = [float((y - low) / (high - low)) for y in known]
    for (text, _, color), y in zip(ordered, spread_positions(heights, _MIN_LABEL_GAP), strict=True):
        ax.annotate(
            text, (1.04, y), xycoords="axes fraction", va="center", fontsize=8, fontweight="bold",
            color=color, gid="end", annotation_clip=False,
        )  # fmt: skip


def spread_positions(positions: Sequence[float], gap: float) -> list[float]:
    """Return ascending positions at least `gap` apart, within 0 and 1. Close positions stay around their middle."""
    clusters: list[tuple[float, int]] = []  # (middle, number of positions)
    for position in positions:
        middle, count = position, 1
        while clusters and middle - clusters[-1][0] < gap * (count + clusters[-1][1]) / 2:
            previous_middle, previous_count = clusters.pop()
            middle = (middle * count + previous_middle * previous_count) / (count + previous_count)
            count += previous_count
        half = gap * (count - 1) / 2
        clusters.append((max(half, min(1 - half, middle)), count))
    return [middle + gap * (k - (count - 1) / 2) for middle, count in clusters for k in range(count)]


def _draw_outlier_lines(ax: Axes, buckets: CurveBuckets, ranks: Sequence[int], lost_ranks: Collection[int]) -> None:
    """Draw a line for each of a few nodes over the band of many; lines differ in dashes as well."""
    for k, rank in enumerate(ranks):
        label = f"{'✕' if rank in lost_ranks else '▲'} node {rank}"
        color = COLORS[_OUTLIER_COLORS[k % len(_OUTLIER_COLORS)]]
        dashes = _OUTLIER_DASHES[k % len(_OUTLIER_DASHES)]
        line = buckets.values[:, k]
        _draw_line(ax, buckets.middle_steps, line, label, label, color=color, linewidth=1.2, linestyle=dashes)
    draw_end_labels(ax, collect_line_labels(ax))


def draw_outliers(ax: Axes, history: History, chart: Chart, max_buckets: int, *, is_inverted: bool = False) -> None:
    """Draw lines of outliers over the band of many nodes; `is_inverted` for the reciprocals of the chart's values."""
    num_ranks = history.num_ranks
    if num_ranks <= MAX_NODE_LINES:
        return
    metrics = compute_run_metrics(history, num_ranks)
    ranks = find_outliers(metrics, metrics.lost_nodes)
    if ranks:
        curves = Curves((chart,), num_ranks, max_buckets, max_lines=num_ranks)
        curves.update(history)
        buckets = curves.get_all(ranks)
        _draw_outlier_lines(ax, buckets.invert() if is_inverted else buckets, ranks, metrics.lost_nodes)


def count_legend_columns(num_entries: int) -> int:
    """Return the columns of a legend across a whole figure: one row, or two of equal length."""
    return num_entries if num_entries <= _MAX_LEGEND_ROW_ENTRIES else -(-num_entries // 2)


def draw_legend_below(ax: Axes, patches: Sequence[Patch]) -> None:
    """Draw a legend below the name of the x axis, in several rows where the panel is narrow."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    is_narrow = ax.get_position().width * figure.get_figwidth() < _NARROW_WIDTH_IN
    below = ScaledTranslation(0, -0.42, figure.dpi_scale_trans)  # inches
    ax.legend(
        handles=list(patches),
        loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=ax.transAxes + below, frameon=False, fontsize=8,
        ncols=4 if is_narrow else count_legend_columns(len(patches)), labelcolor=TEXT_COLOR, handlelength=1.8,
        handleheight=1.0, columnspacing=1.6, borderaxespad=0, borderpad=0,
    )  # fmt: skip


def get_last_value(buckets: CurveBuckets) -> float:
    """Return the last value of the line over all ranks; NaN without values."""
    line = buckets.values[:, -1, 1]
    known = line[np.isfinite(line)]
    return float(known[-1]) if len(known) else np.nan


def describe_lines(layout: ChartLayout, unit: str = "") -> str:
    """Return a note on what the lines are."""
    lines = "mean and range" if layout.banded else "by node"
    return f"{unit}, {lines}".removeprefix(", ") if layout.banded or layout.nodes > 1 else unit

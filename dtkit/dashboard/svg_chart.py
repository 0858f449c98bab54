"""Line charts as SVG for a page: colors from the page's CSS, and a tooltip at each position that names every series.

A chart needs no script. Invisible strips over it have the tooltips, and a line that shows where the pointer is. The
entries of a legend are check boxes that hide lines.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.equal_lines import choose_turn, find_turns
from dtkit.dashboard.summary.ticks import choose_log_ticks, choose_ticks
from dtkit.dashboard.summary.value_scale import is_steep
from dtkit.dashboard.svg_css import CHART_CSS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.dashboard.summary.best_marks import BestMark

MAX_POINTS = 128
"""Points of a series, and strips with a tooltip. More values are merged to means with a band."""
_MAX_DOTS, _NUM_DASHES = 40, 4
_TURN_LENGTH = 9.0  # of a dash of lines that are equal, as in chart/lines.js

_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 44

_ROW_HEIGHT, _CHAR_WIDTH, _MAX_LABEL_CHARS = 15, 6.1, 34  # of a tooltip; widths are estimated
_BEST_ROOM = 24  # beside the middle of a word
MAX_TOGGLES = 16
"""Series of a chart that the legend can hide."""

COLORS = {
    "light": ("#0072B2", "#B87700", "#00805D", "#B0578C", "#2A86BD", "#C65500", "#767600", "#6F58B5"),
    "dark": ("#5CB3EA", "#F0B440", "#35C79B", "#E09BC4", "#8CD0F5", "#FF8A45", "#CFCF3C", "#B3A2EC"),
}
"""Colors of series on a light and on a dark page."""


@dataclasses.dataclass(frozen=True)
class Series:
    """A line, and a band from `low` to `high` where each value is the mean of `merged` steps; `band` is its name.

    Its `color` is a number, or None for the line over all, the mean of the others unless `is_dashed`. Values that are
    `exact`, such as evaluations, are never averaged, and have dots where they are few. NaN in the others is a gap: rows
    that went with an engine.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    color: int | None
    exact: bool = False
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    merged: int = 1
    band: str = "range"
    dash: int = 0
    """Number of its dashes, of four kinds."""
    is_part: bool = False
    """Whether it is a node's line below the mean, which is paler."""
    is_dashed: bool = False
    """Whether a line over all is not the mean of the others."""
    best: BestMark | None = None
    """The point that has a ring with its word."""

    @property
    def css_class(self) -> str:
        """The classes that have its color and its dashes."""
        dashes = f" dash{self.dash % _NUM_DASHES}" if self.dash % _NUM_DASHES else ""
        if self.color is None:
            return "all dashed" if self.is_dashed else "all"
        return f"s{self.color % len(COLORS['light'])}{dashes}"


def make_css() -> str:
    """Return the rules of all charts. The variables of :func:`make_color_variables` have the colors of series."""
    colors = (
        f".chart .s{k} {{ stroke: var(--s{k}); }} .chart :is(.band.s{k}, .k{k}) {{ fill: var(--s{k}); }}"
        for k in range(len(COLORS["light"]))
    )
    toggles = (f"figure:has(.toggle{k}:not(:checked)) .line{k} {{ display: none; }}" for k in range(MAX_TOGGLES))
    return "\n".join([CHART_CSS, *colors, *toggles])


def make_color_variables(scheme: str) -> str:
    """Return the colors of series as CSS variables, on a "light" or a "dark" page."""
    return "; ".join(f"--s{k}: {color}" for k, color in enumerate(COLORS[scheme]))


def draw_chart(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    format_y: Callable[[float], str],
    format_x: Callable[[float], str] = lambda x: f"{x:,.0f}",
    x_name: str = "step",
    from_zero: bool = False,
    may_be_log: bool = False,
    x_range: tuple[float, float] | None = None,
) -> str:
    """Return a chart with its title and its legend as HTML; an empty text without a number to draw.

    The x axis has at least `x_range`.

    With `may_be_log`, the y axis is logarithmic where a linear one would hide the smaller values.
    """
    drawn = [_thin_out(line) for line in series]
    drawn = [line for line in drawn if len(line.x)]
    if not drawn:
        return ""
    is_log = may_be_log and is_steep(np.concatenate([line.y for line in drawn]))
    banded = _lift_bands(drawn) if is_log else drawn  # of which tooltips have the true edges
    frame = _Frame.around(banded, from_zero=from_zero, is_log=is_log)
    if x_range is not None:
        low, high = min(frame.x_low, x_range[0]), max(frame.x_high, x_range[1])
        frame = dataclasses.replace(frame, x_low=low, x_high=high)
    parts = [*_draw_axes(frame, format_x, format_y, x_name)]
    parts += [_draw_band(frame, line, k, 0.36 / (len(drawn) + 1)) for k, line in enumerate(banded)]
    turns = _list_turns(drawn)
    parts += [_draw_series(frame, line, k, turns[k]) for k, line in enumerate(drawn)]
    parts += [_draw_best(frame, line, k, format_y) for k, line in enumerate(drawn)]
    parts += _draw_strips(frame, drawn, format_x, format_y, x_name)
    label = html.escape(f"{title}: {'; '.join(f'{line.label} {format_y(float(line.y[-1]))}' for line in drawn)}")
    note = ", ".join(filter(None, [note, _describe_merged(drawn), "logarithmic" if is_log else ""]))
    heading = f"<h3>{html.escape(title)} <small>{html.escape(note)}</small></h3>"
    svg = f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{heading}{svg}{_draw_legend(drawn)}</figure>"


def _describe_merged(series: Sequence[Series]) -> str:
    widest = max(series, key=lambda line: line.merged)
    return f"mean and {widest.band} of {widest.merged:,} steps" if widest.merged > 1 else ""


def _thin_out(series: Series) -> Series:
    """Return the series without what can't be drawn, and at most ``MAX_POINTS`` points."""
    placed = np.isfinite(series.x)
    x, y = series.x[placed].astype(float), np.where(np.isfinite(series.y), series.y, np.nan)[placed]
    known = np.flatnonzero(np.isfinite(y))
    if series.exact or not len(known):
        kept = known[_choose_extremes(y[known])]
        return dataclasses.replace(series, x=x[kept], y=y[kept])
    inner = slice(known[0], known[-1] + 1)
    low, high = (None if edge is None else edge[placed][inner].astype(float) for edge in (series.low, series.high))
    cut = dataclasses.replace(series, x=x[inner], y=y[inner], low=low, high=high)
    return _merge_neighbors(cut, -(-len(cut.x) // MAX_POINTS))


def _merge_neighbors(series: Series, width: int) -> Series:
    """Return the means of each `width` values; NaN where none of them is known."""
    if width == 1:
        return series
    x, y, first = series.x, series.y, np.arange(0, len(series.x), width)
    count = np.add.reduceat(np.isfinite(y).astype(float), first)
    mean = np.full(len(first), np.nan)
    np.divide(np.add.reduceat(np.nan_to_num(y), first), count, out=mean, where=count > 0)
    return dataclasses.replace(
        series, x=np.add.reduceat(x, first) / np.diff(np.append(first, len(x))), y=mean,
        low=np.fmin.reduceat(y, first), high=np.fmax.reduceat(y, first), merged=series.merged * width,
    )  # fmt: skip


def _lift_bands(series: Sequence[Series]) -> list[Series]:
    """Return series whose bands end at the smallest positive value of all, where a logarithmic axis can't show more."""
    edges = np.concatenate([part for line in series for part in (line.y, line.low) if part is not None])
    least = float(edges[edges > 0].min())
    return [
        line if line.low is None else dataclasses.replace(line, low=np.where(line.low <= 0, least, line.low))
        for line in series
    ]


def _split_at_gaps(values: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each part without a gap."""
    known = np.flatnonzero(np.isfinite(values))
    return np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)


def _choose_extremes(values: np.ndarray) -> np.ndarray:
    """Return the indices of all values; of many, those of the ends, and of the extremes of equal parts."""
    if len(values) <= MAX_POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), MAX_POINTS // 2 - 1)
    extremes = [part[k] for part in parts for k in (np.argmin(values[part]), np.argmax(values[part]))]
    return np.unique([0, *extremes, len(values) - 1])


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Limits of both axes."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    is_log: bool = False

    @classmethod
    def around(cls, series: Sequence[Series], *, from_zero: bool, is_log: bool) -> _Frame:
        x = np.concatenate([line.x for line in series])
        low = min(float(np.nanmin(line.y if line.low is None else line.low)) for line in series)
        high = max(float(np.nanmax(line.y if line.high is None else line.high)) for line in series)
        if is_log:  # a band of merged steps, or a loss of exactly 0, may reach further down than the axis
            values = np.concatenate([line.y for line in series])
            least = float(values[values > 0].min())
            low = max(low if low > 0 else least, least / 10)
            return cls(float(x.min()), float(x.max()), low / 1.15, high * 1.15, is_log=True)
        low = min(0.0, low) if from_zero else low
        margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        return cls(float(x.min()), float(x.max()), low if from_zero else low - margin, high + margin)

    def place_x(self, x: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return _LEFT + (x - self.x_low) / span * (_WIDTH - _LEFT - _RIGHT)

    def place_y(self, y: float) -> float:
        low, high = self.y_low, self.y_high
        if self.is_log:
            y, low, high = (math.log10(max(value, self.y_low)) for value in (y, low, high))
        return _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def choose_y_ticks(self) -> list[float]:
        return choose_log_ticks(self.y_low, self.y_high) if self.is_log else choose_ticks(self.y_low, self.y_high)


def _draw_axes(
    frame: _Frame, format_x: Callable[[float], str], format_y: Callable[[float], str], x_name: str
) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in frame.choose_y_ticks():
        y = frame.place_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = html.escape(formatting.shorten_tick(format_y(tick)))
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for tick in choose_ticks(frame.x_low, frame.x_high):
        label, x = formatting.shorten_tick(format_x(tick)), frame.place_x(tick)
        x = min(x, _WIDTH - _CHAR_WIDTH * len(label) / 2)  # a long one at the end stays within the chart
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{html.escape(label)}</text>')
    middle, below = (_LEFT + right) / 2, bottom + 31  # below the labels, as the last one may be at the end
    parts.append(f'<text class="name" x="{middle:.0f}" y="{below}" text-anchor="middle">{html.escape(x_name)}</text>')
    return parts


def _draw_band(frame: _Frame, series: Series, index: int, opacity: float) -> str:
    """Draw the range of the merged values; overlapping bands share the opacity of one."""
    if series.merged == 1 or series.low is None or series.high is None:
        return ""
    shape = ""
    for part in _split_at_gaps(series.y):
        edges = [(k, series.high[k]) for k in part] + [(k, series.low[k]) for k in part[::-1]]
        points = "L".join(f"{frame.place_x(series.x[k]):.1f},{frame.place_y(y):.1f}" for k, y in edges)
        shape += f"M{points}Z"
    return f'<path class="band {series.css_class} line{index}" opacity="{opacity:.2f}" d="{shape}"/>'


def _list_turns(series: Sequence[Series]) -> list[str]:
    """Return the attributes of dashes for lines that are equal; empty texts for the others, and for a mean."""
    turns = find_turns([(line.x, line.y) for line in series])
    if any(line.color is None for line in series):
        return [""] * len(series)
    dashes = [choose_turn(*turn, _TURN_LENGTH) for turn in turns]
    styles = [f"stroke-dasharray: {dash:g} {gap:g}; stroke-dashoffset: {offset:g}" for offset, (dash, gap) in dashes]
    return [
        f' style="{text}; stroke-linecap: butt"' if count > 1 else ""
        for text, (_, count) in zip(styles, turns, strict=True)
    ]


def _draw_series(frame: _Frame, series: Series, index: int, style: str) -> str:
    shape, places = "", []
    for part in _split_at_gaps(series.y):
        points = [f"{frame.place_x(series.x[k]):.1f},{frame.place_y(series.y[k]):.1f}" for k in part]
        shape += "M" + "L".join(points) + ("h.01" if len(points) == 1 else "")  # a dot, with round caps
        places += points
    look = f"{series.css_class} part" if series.is_part else series.css_class
    line = f'<path class="series {look} line{index}"{style} d="{shape}"/>'
    if len(places) > (_MAX_DOTS if series.exact else 1):
        return line
    centers = (place.split(",") for place in places)
    return line + "".join(
        f'<circle class="dot {series.css_class} line{index}" cx="{x}" cy="{y}" r="3"/>' for x, y in centers
    )


def _draw_best(frame: _Frame, series: Series, index: int, format_y: Callable[[float], str]) -> str:
    """Draw a ring around the best point, with a word above it, or below it at the upper edge."""
    if series.best is None:
        return ""
    step, value, word = series.best
    x, y = frame.place_x(step), frame.place_y(value)
    anchor = "start" if x < _LEFT + _BEST_ROOM else "end" if x > _WIDTH - _RIGHT - _BEST_ROOM else "middle"
    text_y = y - 11 if y > _TOP + _ROW_HEIGHT + 6 else y + 19
    title = html.escape(f"{word} {format_y(value)}, at step {step:,}")
    return (
        f'<g class="best line{index}"><title>{title}</title><circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>'
        f'<text x="{x:.1f}" y="{text_y:.1f}" text-anchor="{anchor}">{word}</text></g>'
    )


def _draw_strips(
    frame: _Frame,
    series: Sequence[Series],
    format_x: Callable[[float], str],
    format_y: Callable[[float], str],
    x_name: str,
) -> list[str]:
    """Draw a strip with a tooltip around each position of any series; of close ones, around one of them."""
    positions = _choose_positions(series)
    middles = [frame.place_x(float(x)) for x in positions]
    edges = [_LEFT, *((a + b) / 2 for a, b in itertools.pairwise(middles)), _WIDTH - _RIGHT]
    reach = (frame.x_high - frame.x_low) / 100
    parts = []
    for k, x in enumerate(positions):
        rows = [(line, _read_at(line, float(x), reach, format_y)) for line in series]
        tip = _draw_tip(middles[k], f"{x_name} {format_x(float(x))}", [(line, text) for line, text in rows if text])
        parts.append(
            f'<g class="strip"><rect x="{edges[k]:.1f}" y="{_TOP}" width="{max(0.5, edges[k + 1] - edges[k]):.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"/><line x1="{middles[k]:.1f}" x2="{middles[k]:.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"/>{tip}</g>'
        )
    return parts


def _choose_positions(series: Sequence[Series]) -> np.ndarray:
    """Return the positions of the series with the most points, and those of others beyond its ends."""
    longest = max((line.x for line in series), key=len)
    beyond = [line.x[(line.x < longest[0]) | (line.x > longest[-1])] for line in series]
    positions = np.unique(np.concatenate([longest, *beyond]))
    return positions[:: -(-len(positions) // (2 * MAX_POINTS))]


def _read_at(series: Series, x: float, reach: float, format_y: Callable[[float], str]) -> str:
    """Return the value at the point next to `x`, with its range; an empty text in a gap, and beyond the ends."""
    if not series.x[0] - reach <= x <= series.x[-1] + reach:
        return ""
    k = int(np.argmin(np.abs(series.x - x)))
    if not np.isfinite(series.y[k]):
        return ""
    value = format_y(float(series.y[k]))
    if series.merged == 1 or series.low is None or series.high is None:
        return value
    return f"{value} ({format_y(float(series.low[k]))} to {format_y(float(series.high[k]))})"


def _draw_tip(x: float, title: str, rows: Sequence[tuple[Series, str]]) -> str:
    """Draw a box with a row for each series, to the right of `x`, or to the left where there is more room."""
    labels = [formatting.sanitize_text(line.label, _MAX_LABEL_CHARS) for line, _ in rows]
    longest = max((len(label) + len(text) + 5 for label, (_, text) in zip(labels, rows, strict=True)), default=0)
    width, height = _CHAR_WIDTH * max(len(title), longest) + 16, _ROW_HEIGHT * (len(rows) + 1) + 9
    left = x + 10 if x < _WIDTH / 2 else x - 10 - width
    left = min(max(0.0, left), _WIDTH - width) if width < _WIDTH else 0.0
    lines = [f'<tspan class="head" x="{left + 8:.0f}" dy="{_ROW_HEIGHT}">{html.escape(title)}</tspan>']
    for label, (line, text) in zip(labels, rows, strict=True):
        key = "kall" if line.color is None else f"k{line.css_class[1:]}"
        lines.append(
            f'<tspan x="{left + 8:.0f}" dy="{_ROW_HEIGHT}" class="{key}">●</tspan><tspan x="{left + 22:.0f}">'
            f'{html.escape(label)}</tspan><tspan x="{left + width - 8:.0f}" class="value">{html.escape(text)}</tspan>'
        )
    box = f'<rect x="{left:.0f}" y="{_TOP}" width="{width:.0f}" height="{height}" rx="5"/>'
    return f'<g class="tip">{box}<text y="{_TOP}">{"".join(lines)}</text></g>'


def _draw_legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = "".join(
        f'<li><label title="show or hide"><input type="checkbox" class="toggle{k}" checked><span>'
        f'<svg class="chart" viewBox="0 0 22 8" aria-hidden="true"><polyline class="series {line.css_class}" '
        f'points="0,4 22,4"/></svg>{html.escape(line.label)}</span></label></li>'
        for k, line in enumerate(series)
    )
    return f'<ul class="legend">{items}</ul>'

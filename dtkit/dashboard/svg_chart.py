"""Line charts as SVG for a page: colors from the page's CSS, and a tooltip at each position that names every series.

A chart needs no script. Invisible strips over it have the tooltips, and a line that shows where the pointer is.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_POINTS = 128
"""Points of a series, and strips with a tooltip. More values are merged to means with a band."""
_MAX_DOTS = 40

_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 34
_NUM_TICKS = 5

CSS = """
svg.chart { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; overflow: visible; }
.chart text { fill: var(--muted); } .chart .grid { stroke: var(--line); } .chart .axis { stroke: var(--muted); }
.chart .series { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.chart .all { stroke: var(--ink); stroke-dasharray: 5 3; stroke-width: 1.9; }
.chart .dot.all { stroke-dasharray: none; } .chart .band.all { fill: var(--ink); }
.chart .band { stroke: none; }
.chart .dot { fill: var(--page); stroke-width: 1.4; } .chart .strip line { stroke: var(--muted); opacity: 0; }
.chart .strip:hover line { opacity: 1; } .chart .strip rect { fill: transparent; }
.legend { font-size: 12px; color: var(--muted); margin: 2px 0 0; padding: 0; list-style: none; }
.legend li { display: inline-block; margin-right: 14px; }
.legend svg.chart { display: inline-block; width: 22px; height: 8px; margin-right: 5px; }
"""

COLORS = {
    "light": ("#0072B2", "#B87700", "#00805D", "#B0578C", "#2A86BD", "#C65500", "#767600", "#6F58B5"),
    "dark": ("#5CB3EA", "#F0B440", "#35C79B", "#E09BC4", "#8CD0F5", "#FF8A45", "#CFCF3C", "#B3A2EC"),
}
"""Colors of series on a light and on a dark page."""


@dataclasses.dataclass(frozen=True)
class Series:
    """A line, and a band from `low` to `high` where each value is the mean of `merged` steps; `band` is its name.

    Its `color` is a number, or None for the dashed line over all. Values that are `exact`, such as evaluations, are
    never averaged, and have dots where they are few.
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

    @property
    def css_class(self) -> str:
        """The class that has its color."""
        return "all" if self.color is None else f"s{self.color % len(COLORS['light'])}"


def make_color_css(scheme: str) -> str:
    """Return the rules that give series their colors, on a "light" or a "dark" page."""
    return " ".join(
        f".chart .s{k} {{ stroke: {color}; }} .chart .band.s{k} {{ fill: {color}; }}"
        for k, color in enumerate(COLORS[scheme])
    )


def draw_chart(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    format_y: Callable[[float], str],
    format_x: Callable[[float], str] = lambda x: f"{x:,.0f}",
    x_name: str = "step",
    from_zero: bool = False,
) -> str:
    """Return a chart with its title and its legend as HTML; an empty text without a number to draw."""
    drawn = [_thin_out(line) for line in series]
    drawn = [line for line in drawn if len(line.x)]
    if not drawn:
        return ""
    frame = _Frame.around(drawn, from_zero=from_zero)
    parts = [*_draw_axes(frame, format_x, format_y, x_name)]
    parts += [_draw_band(frame, line, 0.36 / (len(drawn) + 1)) for line in drawn]
    parts += [_draw_series(frame, line) for line in drawn]
    parts += _draw_strips(frame, drawn, format_x, format_y, x_name)
    label = html.escape(f"{title}: {'; '.join(f'{line.label} {format_y(float(line.y[-1]))}' for line in drawn)}")
    note = ", ".join(filter(None, [note, _describe_merged(drawn)]))
    heading = f"<h3>{html.escape(title)} <small>{html.escape(note)}</small></h3>"
    svg = f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{heading}{svg}{_draw_legend(drawn)}</figure>"


def _describe_merged(series: Sequence[Series]) -> str:
    widest = max(series, key=lambda line: line.merged)
    return f"mean and {widest.band} of {widest.merged:,} steps" if widest.merged > 1 else ""


def _thin_out(series: Series) -> Series:
    """Return the series without what can't be drawn, and at most ``MAX_POINTS`` points."""
    known = np.isfinite(series.x) & np.isfinite(series.y)
    x, y, low, high = (
        None if values is None else np.asarray(values[known], float)
        for values in (series.x, series.y, series.low, series.high)
    )
    assert x is not None
    assert y is not None
    if series.exact:
        kept = _choose_extremes(y)
        return dataclasses.replace(series, x=x[kept], y=y[kept])
    width = -(-len(x) // MAX_POINTS)
    if width > 1:
        first = np.arange(0, len(x), width)
        count = np.diff(np.append(first, len(x)))
        low, high = np.minimum.reduceat(y, first), np.maximum.reduceat(y, first)
        x, y = np.add.reduceat(x, first) / count, np.add.reduceat(y, first) / count
    return dataclasses.replace(series, x=x, y=y, low=low, high=high, merged=series.merged * width)


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

    @classmethod
    def around(cls, series: Sequence[Series], *, from_zero: bool) -> _Frame:
        x = np.concatenate([line.x for line in series])
        low = min(float((line.y if line.low is None else line.low).min()) for line in series)
        high = max(float((line.y if line.high is None else line.high).max()) for line in series)
        low = min(0.0, low) if from_zero else low
        margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        return cls(float(x.min()), float(x.max()), low if from_zero else low - margin, high + margin)

    def place_x(self, x: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return _LEFT + (x - self.x_low) / span * (_WIDTH - _LEFT - _RIGHT)

    def place_y(self, y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)


def choose_ticks(low: float, high: float) -> list[float]:
    """Return round numbers within the limits, about five of them."""
    if high <= low:
        return [low]
    raw = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [k * width for k in range(math.ceil(low / width), math.floor(high / width) + 1)]


def _draw_axes(
    frame: _Frame, format_x: Callable[[float], str], format_y: Callable[[float], str], x_name: str
) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in choose_ticks(frame.y_low, frame.y_high):
        y = frame.place_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = html.escape(formatting.shorten_tick(format_y(tick)))
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    ticks = [tick for tick in choose_ticks(frame.x_low, frame.x_high) if frame.place_x(tick) < right - 40]
    for tick in ticks:
        text = html.escape(formatting.shorten_tick(format_x(tick)))
        parts.append(f'<text x="{frame.place_x(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 15}" text-anchor="end">{html.escape(x_name)}</text>')
    return parts


def _draw_band(frame: _Frame, series: Series, opacity: float) -> str:
    """Draw the range of the merged values; overlapping bands share the opacity of one."""
    if series.merged == 1 or series.low is None or series.high is None:
        return ""
    edges = [*zip(series.x, series.high, strict=True), *zip(series.x[::-1], series.low[::-1], strict=True)]
    points = " ".join(f"{frame.place_x(x):.1f},{frame.place_y(y):.1f}" for x, y in edges)
    return f'<polygon class="band {series.css_class}" opacity="{opacity:.2f}" points="{points}"/>'


def _draw_series(frame: _Frame, series: Series) -> str:
    places = [(frame.place_x(x), frame.place_y(y)) for x, y in zip(series.x, series.y, strict=True)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline class="series {series.css_class}" points="{points}"/>'
    if len(places) > (_MAX_DOTS if series.exact else 1):
        return line
    return line + "".join(
        f'<circle class="dot {series.css_class}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places
    )


def _draw_strips(
    frame: _Frame,
    series: Sequence[Series],
    format_x: Callable[[float], str],
    format_y: Callable[[float], str],
    x_name: str,
) -> list[str]:
    """Draw a strip with a tooltip around each position of the series with the most points."""
    positions = max((line.x for line in series), key=len)
    middles = [frame.place_x(float(x)) for x in positions]
    edges = [_LEFT, *((a + b) / 2 for a, b in itertools.pairwise(middles)), _WIDTH - _RIGHT]
    parts = []
    for k, x in enumerate(positions):
        lines = [f"{x_name} {format_x(float(x))}"]
        lines += [f"{line.label}: {_read_at(line, float(x), format_y)}" for line in series]
        parts.append(
            f'<g class="strip"><rect x="{edges[k]:.1f}" y="{_TOP}" width="{max(0.5, edges[k + 1] - edges[k]):.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"/><line x1="{middles[k]:.1f}" x2="{middles[k]:.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"/><title>{html.escape(chr(10).join(lines))}</title></g>'
        )
    return parts


def _read_at(series: Series, x: float, format_y: Callable[[float], str]) -> str:
    """Return the value at the point next to `x`, with its range."""
    k = int(np.argmin(np.abs(series.x - x)))
    value = format_y(float(series.y[k]))
    if series.merged == 1 or series.low is None or series.high is None:
        return value
    return f"{value} ({format_y(float(series.low[k]))} to {format_y(float(series.high[k]))})"


def _draw_legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = "".join(
        f'<li><svg class="chart" viewBox="0 0 22 8" aria-hidden="true"><polyline class="series {line.css_class}" '
        f'points="0,4 22,4"/></svg>{html.escape(line.label)}</li>'
        for line in series
    )
    return f'<ul class="legend">{items}</ul>'

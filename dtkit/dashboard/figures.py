"""The kept picture of a run: its panels under a title, drawn from the same numbers as the live view.

Only ``Figure`` and the Agg canvas are used, never pyplot: pictures are drawn on other threads than the user's.
"""

from __future__ import annotations

import base64
import html
import io
import textwrap
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from dtkit._util import formatting
from dtkit.dashboard import custom
from dtkit.dashboard.axes import ALERT, COLOURS, GRID, INK, MUTED, mark_key
from dtkit.dashboard.fates import begun
from dtkit.dashboard.panels import gradient_norm, learning_rate, loss, memory, step_time, throughput, timeline, waffle
from dtkit.dashboard.remarks import ALERTS, GLYPHS, remarks
from dtkit.dashboard.series import MAX_LINES
from dtkit.dashboard.strip import strip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes

    from dtkit.dashboard.source import Source
    from dtkit.history.history import History

    Panel = Callable[[Axes, History], None]

__all__ = ["COLOURS", "GRID", "INK", "MUTED", "image", "new_figure", "panels_of", "png", "run_figure", "width"]

_DPI = 160
_WIDTH, _ROW, _LOW = 10.8, 3.1, 2.3  # inches: of a figure with two columns, and the height of a row of charts
_LINE = 0.24  # the height of a line of the title
_LETTERS = 140  # in such a line


def run_figure(source: Source, panels: Sequence[Panel] | None = None) -> Figure:
    """Draw a run as it stands: what there is to say, and `panels` in two columns (:func:`panels_of` by default).

    Bars, strips and squares take a row of their own, as does a panel that has no neighbour.
    """
    wide = {} if panels else _wide(source)
    rows = _rows([*panels_of(source.history), *_own()] if panels is None else panels, wide)
    heights = [wide[row[0]] if row[0] in wide else _height(row, source.spec.world_size) for row in rows]
    said = _said(source)
    head = _LINE * (1 + len(said)) + 0.14
    figure = new_figure(_WIDTH, sum(heights) + head)
    _title(figure, source, said, head)
    grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
    for k, row in enumerate(rows):
        for column, panel in enumerate(row):
            panel(figure.add_subplot(grid[k, column] if len(row) == 2 else grid[k, :]), source.history)
    return figure


def panels_of(history: History) -> list[Panel]:
    """What there is to see in a history: loss, throughput and the steps' time; two more where they say something."""
    more: list[Panel] = [gradient_norm.draw, learning_rate.draw]
    wanted = gradient_norm.known(history) or learning_rate.changed(history)
    return [loss.draw, throughput.draw, step_time.draw, *(more if wanted else [])]


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure, in inches, that no other thread's pyplot knows of."""
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG, sharp on a dense screen; :func:`width` tells how wide to show it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, facecolor="white")
    return file.getvalue()


def width(figure: Figure) -> int:
    """The figure's width in CSS pixels."""
    return round(figure.get_figwidth() * 92)


def image(figure: Figure, alt: str) -> str:
    """The figure within HTML, no wider than where it stands; `alt` says the same in words."""
    data = base64.b64encode(png(figure)).decode("ascii")
    place = f'width="{width(figure)}" style="max-width: 100%" alt="{html.escape(alt)}"'
    return f'<img src="data:image/png;base64,{data}" {place}>'


def _wide(source: Source) -> dict[Panel, float]:
    """The panels that need more than a history, in the order of the picture, and their heights in inches."""
    found: dict[Panel, float] = {}
    ranks, strips = source.spec.world_size, getattr(source, "timeline", None)
    if ranks > MAX_LINES:
        found[waffle.draw] = 0.55 + 0.27 * waffle.rows(ranks)
    shown = strip(strips)
    if shown is not None:
        found[timeline.panel(strips)] = 1.1 + (0.27 if len(shown.ranks) <= MAX_LINES else 0.18) * len(shown.ranks)
    if source.nodes and len(source.history):
        found[memory.panel(source.nodes)] = 0.55 + 0.25 * (ranks if ranks <= MAX_LINES else 3)
    return found


def _own() -> list[Panel]:
    """The user's own panels."""
    return [custom.titled(name, draw) for name, draw in custom.panels().items()]


def _rows(panels: Sequence[Panel], wide: Mapping[Panel, float]) -> list[list[Panel]]:
    """Pairs, in order; wide ones alone: squares first, strips and memory behind the bars of the steps' time."""
    first = [panel for panel in wide if panel is waffle.draw]
    rows: list[list[Panel]] = [[panel] for panel in first]
    for panel in panels:
        room = rows and len(rows[-1]) == 1 and not {panel, rows[-1][0]} & {step_time.draw, *wide}
        if room:
            rows[-1].append(panel)
        else:
            rows.append([panel])
        if panel is step_time.draw:
            rows += [[other] for other in wide if other not in first]
    return rows


def _height(row: list[Panel], ranks: int) -> float:
    """A row of bars is as high as its bars; what is second to loss and throughput is lower."""
    if row[0] is step_time.draw:
        return 1.25 + 0.27 * (ranks if ranks <= MAX_LINES else 3)
    return _LOW if gradient_norm.draw in row or learning_rate.draw in row else _ROW


def _said(source: Source) -> list[tuple[str, str]]:
    """(kind, text) of each line below the title: the remarks, and what the marks on the time axes mean."""
    lines = []
    for remark in remarks(source):
        parts = textwrap.wrap(f"{GLYPHS[remark.kind]} {remark.text}", _LETTERS, subsequent_indent="    ")
        lines += [(remark.kind, part) for part in parts]
    key = mark_key(source.history.events)
    return [*lines, ("marks", f"marks:  {key}")] if key else lines


def _title(figure: Figure, source: Source, said: Sequence[tuple[str, str]], head: float) -> None:
    """One line: what, how, how far; below it those of `said`. They take the top `head` inches."""
    spec, status, height, first = source.spec, source.status, figure.get_figheight(), begun(source)
    text = " · ".join(
        (
            formatting.plain(spec.name, 40),
            formatting.plain(spec.strategy, 60),
            formatting.plural(spec.world_size, "node") + (f" (was {first:,})" if first > spec.world_size else ""),
            status.state.value,
            f"{status.step:,} of {status.steps:,} steps",
        )
    )
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - head / height), h_pad=0.08, hspace=0.04)
    style: dict[str, Any] = {"x": 0.012, "ha": "left", "va": "top", "parse_math": False}
    figure.suptitle(text, y=1 - 0.09 / height, fontsize=11.5, fontweight="bold", color=INK, **style)
    for k, (kind, line) in enumerate(said):
        alert = kind in ALERTS
        figure.text(
            y=1 - (0.11 + _LINE * (k + 1)) / height, s=line, fontsize=9.5, fontweight="bold" if alert else "normal",
            color=ALERT if alert else MUTED, gid=f"remark-{kind}", **style,
        )  # fmt: skip

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
from dtkit.dashboard.figures import custom_panels
from dtkit.dashboard.figures.panels import (
    gradient_norm,
    learning_rate,
    loss,
    memory,
    step_time,
    throughput,
    timeline,
    waffle,
)
from dtkit.dashboard.figures.style import ALERT_COLOR, COLORS, GRID_COLOR, MUTED_COLOR, TEXT_COLOR, describe_event_marks
from dtkit.dashboard.summary.curves import MAX_NODE_LINES
from dtkit.dashboard.summary.lost_nodes import count_initial_nodes
from dtkit.dashboard.summary.notices import ALERT_KINDS, NOTICE_GLYPHS, collect_notices
from dtkit.dashboard.summary.step_strip import make_step_strip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History

    Panel = Callable[[Axes, History], None]

__all__ = [
    "COLORS",
    "GRID_COLOR",
    "MUTED_COLOR",
    "TEXT_COLOR",
    "create_figure",
    "draw_run",
    "format_img_tag",
    "png",
    "select_panels",
    "width",
]

_DPI = 160
_WIDTH_IN, _ROW_HEIGHT_IN, _LOW_ROW_HEIGHT_IN = (
    10.8,
    3.1,
    2.3,
)  # inches: of a figure with two columns, and the height of a row of charts
_TITLE_LINE_HEIGHT_IN = 0.24  # the height of a line of the title
_TITLE_LINE_CHARS = 140  # in such a line


def draw_run(run: RunView, panels: Sequence[Panel] | None = None) -> Figure:
    """Draw a run as it stands: what there is to say, and `get_panels` in two columns (:func:`select_panels` by default).

    Bars, strips and squares take a row of their own, as does a panel that has no neighbour.
    """
    wide = {} if panels else _make_wide_panels(run)
    rows = _arrange_rows([*select_panels(run.history), *_wrap_custom_panels()] if panels is None else panels, wide)
    heights = [wide[row[0]] if row[0] in wide else _get_row_height(row, run.spec.world_size) for row in rows]
    said = _collect_title_lines(run)
    head = _TITLE_LINE_HEIGHT_IN * (1 + len(said)) + 0.14
    figure = create_figure(_WIDTH_IN, sum(heights) + head)
    _draw_title(figure, run, said, head)
    grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
    for k, row in enumerate(rows):
        for column, panel in enumerate(row):
            panel(figure.add_subplot(grid[k, column] if len(row) == 2 else grid[k, :]), run.history)
    return figure


def select_panels(history: History) -> list[Panel]:
    """What there is to see in a history: loss, throughput and the steps' time; two more where they say something."""
    more: list[Panel] = [gradient_norm.draw, learning_rate.draw]
    wanted = gradient_norm.has_gradient_norm(history) or learning_rate.has_lr_changes(history)
    return [loss.draw, throughput.draw, step_time.draw, *(more if wanted else [])]


def create_figure(width: float, height: float) -> Figure:
    """An empty white figure, in inches, that no other thread's pyplot knows of."""
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def render_png(figure: Figure) -> bytes:
    """The figure as a PNG, sharp on a dense screen; :func:`width` tells how wide to show it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, facecolor="white")
    return file.getvalue()


def get_css_width(figure: Figure) -> int:
    """The figure's width in CSS pixels."""
    return round(figure.get_figwidth() * 92)


def format_img_tag(figure: Figure, alt: str) -> str:
    """The figure within HTML, no wider than where it stands; `alt` says the same in words."""
    data = base64.b64encode(render_png(figure)).decode("ascii")
    place = f'width="{get_css_width(figure)}" style="max-width: 100%" alt="{html.escape(alt)}"'
    return f'<img src="data:image/png;base64,{data}" {place}>'


def _make_wide_panels(run: RunView) -> dict[Panel, float]:
    """The panels that need more than a history, in the order of the picture, and their heights in inches."""
    found: dict[Panel, float] = {}
    ranks, strips = run.spec.world_size, getattr(run, "timeline", None)
    if ranks > MAX_NODE_LINES:
        found[waffle.draw] = 0.55 + 0.27 * waffle.count_rows(ranks)
    shown = make_step_strip(strips)
    if shown is not None:
        found[timeline.make_panel(strips)] = 1.1 + (0.27 if len(shown.ranks) <= MAX_NODE_LINES else 0.18) * len(
            shown.ranks
        )
    if run.nodes and len(run.history):
        found[memory.make_panel(run.nodes)] = 0.55 + 0.25 * (ranks if ranks <= MAX_NODE_LINES else 3)
    return found


def _wrap_custom_panels() -> list[Panel]:
    """The user's own panels."""
    return [custom_panels.wrap_panel(name, draw) for name, draw in custom_panels.get_panels().items()]


def _arrange_rows(panels: Sequence[Panel], wide_panels: Mapping[Panel, float]) -> list[list[Panel]]:
    """Pairs, in order; wide ones alone: squares first, strips and memory behind the bars of the steps' time."""
    first = [panel for panel in wide_panels if panel is waffle.draw]
    rows: list[list[Panel]] = [[panel] for panel in first]
    for panel in panels:
        room = rows and len(rows[-1]) == 1 and not {panel, rows[-1][0]} & {step_time.draw, *wide_panels}
        if room:
            rows[-1].append(panel)
        else:
            rows.append([panel])
        if panel is step_time.draw:
            rows += [[other] for other in wide_panels if other not in first]
    return rows


def _get_row_height(row: list[Panel], num_ranks: int) -> float:
    """A row of bars is as high as its bars; what is second to loss and throughput is lower."""
    if row[0] is step_time.draw:
        return 1.25 + 0.27 * (num_ranks if num_ranks <= MAX_NODE_LINES else 3)
    return _LOW_ROW_HEIGHT_IN if gradient_norm.draw in row or learning_rate.draw in row else _ROW_HEIGHT_IN


def _collect_title_lines(run: RunView) -> list[tuple[str, str]]:
    """(kind, text) of each line below the title: the remarks, and what the marks on the time axes mean."""
    lines = []
    for remark in collect_notices(run):
        parts = textwrap.wrap(
            f"{NOTICE_GLYPHS[remark.kind]} {remark.text}", _TITLE_LINE_CHARS, subsequent_indent="    "
        )
        lines += [(remark.kind, part) for part in parts]
    key = describe_event_marks(run.history.events)
    return [*lines, ("marks", f"marks:  {key}")] if key else lines


def _draw_title(figure: Figure, run: RunView, lines: Sequence[tuple[str, str]], title_height: float) -> None:
    """One line: what, how, how far; below it those of `said`. They take the top `head` inches."""
    spec, status, height, first = run.spec, run.status, figure.get_figheight(), count_initial_nodes(run)
    text = " · ".join(
        (
            formatting.sanitize_text(spec.name, 40),
            formatting.sanitize_text(spec.strategy, 60),
            formatting.format_count(spec.world_size, "node") + (f" (was {first:,})" if first > spec.world_size else ""),
            status.state.value,
            f"{status.step:,} of {status.steps:,} steps",
        )
    )
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - title_height / height), h_pad=0.08, hspace=0.04)
    style: dict[str, Any] = {"x": 0.012, "ha": "left", "va": "top", "parse_math": False}
    figure.suptitle(text, y=1 - 0.09 / height, fontsize=11.5, fontweight="bold", color=TEXT_COLOR, **style)
    for k, (kind, line) in enumerate(lines):
        alert = kind in ALERT_KINDS
        figure.text(
            y=1 - (0.11 + _TITLE_LINE_HEIGHT_IN * (k + 1)) / height, s=line, fontsize=9.5, fontweight="bold" if alert else "normal",
            color=ALERT_COLOR if alert else MUTED_COLOR, gid=f"remark-{kind}", **style,
        )  # fmt: skip

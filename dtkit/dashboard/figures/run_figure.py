"""The figure of a run: its panels under a title, drawn from the same numbers as the live view."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

from matplotlib.layout_engine import ConstrainedLayoutEngine

from dtkit._util import formatting
from dtkit.dashboard.figures import custom_panels, panel_frame
from dtkit.dashboard.figures.panels import (
    gradient_norm,
    learning_rate,
    log,
    loss,
    memory,
    metrics,
    nodes,
    scalars,
    step_time,
    system,
    throughput,
    tiles,
    timeline,
    waffle,
)
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.figures.style import ALERT_COLOR, MUTED_COLOR, TEXT_COLOR, fit_texts
from dtkit.dashboard.summary.activity import name_state
from dtkit.dashboard.summary.curves import MAX_NODE_LINES
from dtkit.dashboard.summary.event_marks import MARK_SEPARATOR, describe_event_marks
from dtkit.dashboard.summary.lost_nodes import count_initial_nodes
from dtkit.dashboard.summary.notices import ALERT_KINDS, NOTICE_GLYPHS, collect_notices, list_error_lines
from dtkit.dashboard.summary.step_strip import make_step_strip
from dtkit.dashboard.summary.verdict import VERDICT_GLYPH, find_shown_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History

    Panel = Callable[[Axes, History], None]

# Shown 676 px wide on its card in a window of 800 px, and 476 px wide in one of 600 px, where 8 points are 10 px.
_WIDTH_IN, _ROW_HEIGHT_IN, _LOW_ROW_HEIGHT_IN = 5.5, 2.0, 1.45
_TITLE_LINE_HEIGHT_IN = 0.2
_TILE_HEIGHT_IN, _TABLE_LINE_IN, _TABLE_FRAME_IN = 0.76, 0.175, 0.35
_TITLE_CHARS, _TITLE_LINE_CHARS = 62, 78


def draw_run(run: RunView, panels: Sequence[Panel] | None = None) -> Figure:
    """Draw notices and panels of a run as it is now, in two columns; without `panels`, those of :func:`select_panels`.

    Bars, strips and squares take a row of their own, and so does a panel without a neighbor.
    """
    if panels is not None:
        return _draw_rows(run, _arrange_rows(panels, {}), {}, {})
    custom, wide_panels = wrap_custom_panels(), _make_wide_panels(run)
    last = _make_last_panels(run) if len(run.history) or run.exception is not None else {}
    rows = _arrange_rows([*select_panels(run.history), *custom], wide_panels, _list_wide(custom))
    return _draw_rows(run, rows, _make_first_panels(run), wide_panels, last)


def draw_text(run: RunView) -> Figure:
    """Draw what a run has in words: title, notices, headline numbers and log."""
    return _draw_rows(run, [], _make_first_panels(run), {}, _make_log_panel(run))


def _draw_rows(
    run: RunView,
    rows: list[list[Panel]],
    first: Mapping[Panel, float],
    given_heights: Mapping[Panel, float],
    last: Mapping[Panel, float] | None = None,
) -> Figure:
    """Draw rows of panels below the title. Panels that have heights are given with them, in inches."""
    has_steps = bool(len(run.history))
    rows = rows if has_steps or run.exception is None else []  # of a run that failed before its first step
    rows = [*([panel] for panel in first if has_steps), *rows, *([panel] for panel in last or {})]
    given_heights = {**given_heights, **first, **(last or {})}
    heights = [given_heights.get(row[0]) or _get_row_height(row, run.spec.world_size) for row in rows]
    title, title_lines = _wrap_title(list_title_parts(run)), _wrap_title_lines(run)
    title_height = _TITLE_LINE_HEIGHT_IN * (len(title) + len(title_lines)) + 0.14
    figure = create_figure(_WIDTH_IN, sum(heights) + title_height)
    _draw_title(figure, title, title_lines, title_height)
    if not rows:  # nothing was measured
        return figure
    grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
    text_rows = {k for k, row in enumerate(rows) if row[0] in first}
    for k in sorted(range(len(rows)), key=lambda k: k in text_rows):  # the charts are the first axes
        row = rows[k]
        for column, panel in enumerate(row):
            panel(figure.add_subplot(grid[k, column] if len(row) == 2 else grid[k, :]), run.history)
    fit_texts(figure)
    return figure


def select_panels(history: History) -> list[Panel]:
    """Return the panels that a history has data for."""
    small: list[Panel] = [gradient_norm.draw] if gradient_norm.has_gradient_norm(history) else []
    small += [learning_rate.draw] if learning_rate.has_lr_changes(history) else []  # else the title has it
    main = [loss.draw, throughput.draw, *metrics.make_panels(history), *scalars.make_panels(history)]
    return [*main, *small, *system.make_panels(history), step_time.draw]


def _make_first_panels(run: RunView) -> dict[Panel, float]:
    """Return the headline numbers with their height in inches."""
    num_rows = -(-len(tiles.list_tiles(run)) // tiles.TILES_PER_ROW)
    return {tiles.make_panel(run): _TILE_HEIGHT_IN * num_rows + 0.15}


def _make_last_panels(run: RunView) -> dict[Panel, float]:
    """Return the table of nodes and the log with their heights in inches."""
    panels: dict[Panel, float] = {}
    if run.nodes:
        panels[nodes.make_panel(run)] = _TABLE_FRAME_IN + _TABLE_LINE_IN * nodes.count_lines(run)
    return panels | _make_log_panel(run)


def _make_log_panel(run: RunView) -> dict[Panel, float]:
    num_lines = log.count_lines(run)
    return {log.make_panel(run): _TABLE_FRAME_IN + _TABLE_LINE_IN * num_lines} if num_lines else {}


def _make_wide_panels(run: RunView) -> dict[Panel, float]:
    """Return the panels that need more than a history, in order, with their heights in inches."""
    panels: dict[Panel, float] = {}
    ranks, run_timeline = run.spec.world_size, run.timeline
    if ranks > MAX_NODE_LINES:
        panels[waffle.draw] = 0.55 + 0.27 * waffle.count_rows(ranks)
    step_strip = make_step_strip(run_timeline)
    if step_strip is not None:
        row_height = 0.27 if len(step_strip.ranks) <= MAX_NODE_LINES else 0.18
        panels[timeline.make_panel(run_timeline)] = 1.1 + row_height * len(step_strip.ranks)
    if run.nodes and len(run.history):
        panels[memory.make_panel(run.nodes)] = 0.55 + 0.25 * (ranks if ranks <= MAX_NODE_LINES else 3)
    return panels


def wrap_custom_panels() -> dict[Panel, bool]:
    """Return the user's panels, each with its title and its error handling, and whether it takes the full width."""
    return {
        panel_frame.wrap_panel(name, draw): custom_panels.is_wide(name)
        for name, draw in custom_panels.get_panels().items()
    }


def _list_wide(custom: Mapping[Panel, bool]) -> list[Panel]:
    return [panel for panel, is_wide in custom.items() if is_wide]


def _arrange_rows(
    panels: Sequence[Panel], wide_panels: Mapping[Panel, float], wide_custom: Sequence[Panel] = ()
) -> list[list[Panel]]:
    """Return panels by row: squares first, then pairs, with strips and memory after the bars of step time."""
    first = [panel for panel in wide_panels if panel is waffle.draw]
    rows: list[list[Panel]] = [[panel] for panel in first]
    alone = [step_time.draw, *wide_panels, *wide_custom]
    for panel in panels:
        fits_last_row = rows and len(rows[-1]) == 1 and panel not in alone and rows[-1][0] not in alone
        if fits_last_row:
            rows[-1].append(panel)
        else:
            rows.append([panel])
        if panel is step_time.draw:
            rows += [[wide] for wide in wide_panels if wide not in first]
    return rows


def _get_row_height(row: list[Panel], num_ranks: int) -> float:
    """Return the height of a row. Bars set their own height, and the others than loss and throughput are low."""
    if row[0] is step_time.draw:
        return 1.25 + 0.27 * (num_ranks if num_ranks <= MAX_NODE_LINES else 3)
    return _ROW_HEIGHT_IN if loss.draw in row or throughput.draw in row else _LOW_ROW_HEIGHT_IN


def list_notice_lines(run: RunView) -> list[tuple[str, str]]:
    """Return (kind, text) of each line below the title of a run, the most urgent first."""
    lines = []
    if run.exception is not None:
        error_lines = list_error_lines(run.exception, has_ended=run.status.state.has_ended)
        lines += [("error", line) for line in error_lines]
    lines += [(notice.kind, f"{NOTICE_GLYPHS[notice.kind]} {notice.text}") for notice in collect_notices(run)]
    verdict = find_shown_verdict(run)
    if verdict is not None:
        lines.append(("verdict", f"{VERDICT_GLYPH} {verdict.text}"))
    if run.lr is not None and len(run.history) and not learning_rate.has_lr_changes(run.history):
        lines.append(("lr", f"learning rate {_describe_learning_rate(run.lr, run.history[-1].lr)}"))
    return lines


def is_alert(kind: str) -> bool:
    """Return whether a line of :func:`list_notice_lines` is an alert."""
    return kind in (*ALERT_KINDS, "error")


def _wrap_title_lines(run: RunView) -> list[tuple[str, str]]:
    """Return (kind, text) of each line below the title: the notices, and a legend of event marks."""
    lines = [(kind, part) for kind, line in list_notice_lines(run) for part in _wrap_line(line)]
    return [*lines, *(("marks", part) for part in _wrap_marks(describe_event_marks(run.history.events)))]


def _wrap_marks(legend: str) -> list[str]:
    """Return the legend of event marks in lines that don't end within an entry."""
    entries = [entry.replace(" ", "\u00a0") for entry in legend.split(MARK_SEPARATOR)] if legend else []
    wrapped = textwrap.wrap("marks:  " + MARK_SEPARATOR.join(entries), _TITLE_LINE_CHARS, drop_whitespace=False)
    return [part.replace("\u00a0", " ").rstrip() for part in wrapped] if entries else []


def _describe_learning_rate(current: float, previous: float) -> str:
    now, before = map(formatting.format_learning_rate, (current, previous))
    if current != previous:
        return f"{now} from the next step on, {before} until now"
    return f"{now}, the same since the first step"


def _wrap_line(line: str) -> list[str]:
    # No line breaks within a `command`.
    whole = re.sub(r"`[^`]+`", lambda command: command[0].replace(" ", "\u00a0"), line)
    wrapped = textwrap.wrap(
        whole, _TITLE_LINE_CHARS, subsequent_indent="    ", drop_whitespace=False, break_on_hyphens=False
    )
    parts = [*wrapped[:1], *(f"    {part.strip(' ')}" for part in wrapped[1:])]  # a space at a break may begin a line
    return [part.replace("\u00a0", " ") for part in parts]


def _draw_title(figure: Figure, title: list[str], lines: Sequence[tuple[str, str]], title_height: float) -> None:
    """Draw the title, and `lines` below it, into the top `title_height` inches."""
    height = figure.get_figheight()
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - title_height / height), h_pad=0.08, hspace=0.04)
    text_style: dict[str, Any] = {"x": 0.012, "ha": "left", "va": "top", "parse_math": False}
    figure.suptitle(
        "\n".join(title), y=1 - 0.09 / height, fontsize=10.5, fontweight="bold", color=TEXT_COLOR, **text_style
    )
    for k, (kind, line) in enumerate(lines, len(title)):
        figure.text(
            y=1 - (0.11 + _TITLE_LINE_HEIGHT_IN * k) / height, s=line, fontsize=8.5, gid=f"notice-{kind}",
            fontweight="bold" if is_alert(kind) else "normal", color=ALERT_COLOR if is_alert(kind) else MUTED_COLOR,
            **text_style,
        )  # fmt: skip


def _wrap_title(parts: Sequence[str]) -> list[str]:
    """Return the title in lines that don't end within a part, unless it is longer than a line."""
    whole = " · ".join(part.replace(" ", "\u00a0") for part in parts)
    return [line.removesuffix(" ·") for line in textwrap.wrap(whole, _TITLE_CHARS)]


def list_title_parts(run: RunView) -> tuple[str, ...]:
    """Return model, strategy, nodes, state and steps of a run."""
    spec, status, num_initial_nodes = run.spec, run.status, count_initial_nodes(run)
    left_out = f" (was {num_initial_nodes:,})" if num_initial_nodes > spec.world_size else ""
    return (
        formatting.sanitize_text(spec.name, 40),
        formatting.sanitize_text(spec.strategy, 60),
        formatting.format_count(spec.world_size, "node") + left_out,
        name_state(run),
        f"{status.step:,} of {status.steps:,} steps"
        + (f" in {formatting.format_elapsed(status.elapsed_s)}" if status.step else ""),
    )

"""The picture of a run that a saved notebook keeps: words in HTML, and charts on cards, as many in a row as fit.

The words have the color of the page, and the cards are dark in a dark theme (:mod:`dtkit.dashboard.live.placement`).
Front ends without HTML get all of it as one PNG, from the same charts.
"""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from dtkit._util import formatting
from dtkit.dashboard.figures.panels import log, memory, tiles
from dtkit.dashboard.figures.render import draw_card, encode_small_png, format_cards, get_css_width
from dtkit.dashboard.figures.run_charts import draw_run_charts
from dtkit.dashboard.figures.run_figure import draw_text, is_alert, list_notice_lines, list_title_parts
from dtkit.dashboard.summary.activity import name_bad_end
from dtkit.dashboard.summary.event_marks import describe_event_marks
from dtkit.dashboard.summary.metrics import MEAN_LOSS
from dtkit.dashboard.summary.notices import WELL_KINDS
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from matplotlib.figure import Figure

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.metrics import Tile

_REST = "run.figure() and run.report() have the machines, the timeline and the nodes, too"
COLORS = {"accent": "#0e79c2", "good": "#0a8562", "bad": "#c05610"}
"""Colors of words: a contrast of at least 4.5 on white, and of 4 on JupyterLab's dark where its rule is removed."""
STATE_GLYPHS = {State.RUNNING: "▶", State.PAUSED: "‖", State.COMPLETED: "✓", State.STOPPED: "■", State.FAILED: "✕"}
"""Glyph of a state that can last, the same as in the live view."""
_MUTED, _GROUND, _BAR_COLOR = "opacity: 0.72", "rgba(128, 128, 128, 0.14)", "#808080"
_TILE_WIDTH = 128  # pixels at least, with its gap
_COLUMN_WIDTH, _GAP = 616, 8  # pixels of the PNG


class KeptPicture(NamedTuple):
    """A run in HTML, and as a PNG with its width in CSS pixels."""

    page: str
    png: bytes
    width: int


class KeptPage(NamedTuple):
    """A run in HTML, the step of its words and charts, and the charts alone."""

    step: int
    page: str
    cards: str


def draw_kept_picture(run: RunView, show_page: Callable[[str], None] | None = None) -> KeptPicture:
    """Draw what a saved notebook keeps of a run that has ended.

    `show_page` gets the page as soon as it is drawn: the PNG takes a third of the time, and few front ends need it.
    """
    charts = _draw_cards(draw_run_charts(run))
    page = f'<div data-dtkit-end="{run.status.step}">{format_page(run, _format_charts(charts))}</div>'
    if show_page is not None:
        show_page(page)
    joined = _join_cards([draw_card(draw_text(run)), *(chart for chart, _ in charts)])
    return KeptPicture(page, encode_small_png(joined), joined.width)


def draw_page(run: RunView) -> KeptPage:
    """Draw a run that goes on; this takes seconds on a busy machine. Words and charts are of one moment."""
    step, shown = run.status.step, tiles.list_tiles(run)
    head, end = list(_iterate_head(run, shown)), list(_iterate_end(run))  # before the charts, which take longer
    figures = draw_run_charts(run, next((tile.value for tile in shown if tile.label == MEAN_LOSS), None))
    cards = _format_charts(_draw_cards(figures))
    return KeptPage(step, _join_page(head, cards, end), cards)


def format_page(run: RunView, cards: str) -> str:
    """Return a run in HTML: the present words, which take some milliseconds, around cards with its charts."""
    return _join_page(_iterate_head(run, tiles.list_tiles(run)), cards, _iterate_end(run))


def _join_page(head: Iterable[str], cards: str, end: Iterable[str]) -> str:
    return f'<div style="line-height: 1.45">{"".join([*head, cards, *end])}</div>'


def _draw_cards(figures: Iterable[Figure]) -> list[tuple[Image.Image, int]]:
    """Return the figures as cards, each with its width in CSS pixels."""
    return [(draw_card(figure), get_css_width(figure)) for figure in figures]


def _format_charts(charts: Sequence[tuple[Image.Image, int]]) -> str:
    pngs = [(encode_small_png(card), width) for card, width in charts]
    return format_cards(pngs, "the charts of the run") if pngs else ""


def _join_cards(cards: Sequence[Image.Image]) -> Image.Image:
    """Return all cards in two columns, each in the one that is shorter so far."""
    heights, places = [0, 0], []
    for card in cards:
        size = (_COLUMN_WIDTH, round(card.height * _COLUMN_WIDTH / card.width))
        column = heights.index(min(heights))
        places.append((card.resize(size, Image.Resampling.LANCZOS), (column * (_COLUMN_WIDTH + _GAP), heights[column])))
        heights[column] += size[1] + _GAP
    num_columns = min(2, len(cards))
    joined = Image.new("RGBA", (num_columns * (_COLUMN_WIDTH + _GAP) - _GAP, max(heights) - _GAP))
    for card, place in places:
        joined.paste(card, place)
    return joined


def _iterate_head(run: RunView, shown: Sequence[Tile]) -> Iterator[str]:
    """Return title, state, progress, notices and headline numbers, in the order of the live view."""
    name, strategy, nodes, state, steps = list_title_parts(run)
    tone = _get_state_tone(run)
    chip = _style_words(tone, "margin-left: auto; padding: 0 12px; border: 1.5px solid; border-radius: 99px")
    glyph = "✕" if tone == "bad" else "▲" if name_bad_end(run) else STATE_GLYPHS.get(run.status.state, "")
    yield (
        '<div style="display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 10px">'
        f'<strong style="font-size: 1.3em">{_escape(name)}</strong>'
        f'<span style="{_MUTED}">{_escape(f"{strategy} · {nodes}")}</span>'
        f"<strong {chip}>{_escape(f'{glyph} {state}'.strip())}</strong></div>"
    )
    share = min(1.0, run.status.step / run.status.steps) if run.status.steps else 0.0
    bar = f"width: {share:.1%}; height: 8px; border-radius: 4px; background: {COLORS.get(tone, _BAR_COLOR)}"
    yield f'<div style="margin: 6px 0 2px; border-radius: 4px; background: {_GROUND}"><div style="{bar}"></div></div>'
    yield f'<div style="{_MUTED}">{_escape(steps)}</div>'
    for kind, line in list_notice_lines(run):
        yield f"<div {_style_notice(kind)}>{_escape(line)}</div>"
    if len(run.history):
        yield from _iterate_tiles(shown)
    if marks := describe_event_marks(run.history.events):
        yield f'<div style="margin: 6px 0; {_MUTED}">marks: {_escape(marks)}</div>'


def _iterate_tiles(shown: Sequence[Tile]) -> Iterator[str]:
    """Return headline numbers in one row, or where that has no room in two halves, so that none is alone in a row."""
    half = math.ceil(len(shown) / 2)
    yield '<div style="display: flex; flex-wrap: wrap; gap: 8px; margin: 10px 0">'
    for part in (shown[:half], shown[half:]):
        width = _TILE_WIDTH * len(part)
        yield f'<div style="display: flex; gap: 8px; flex: {len(part)} 1 {width}px">'
        yield from map(_format_tile, part)
        yield "</div>"
    yield "</div>"


def _format_tile(tile: Tile) -> str:
    box = f"flex: 1 1 0; min-width: 0; padding: 7px 10px; border-radius: 8px; background: {_GROUND}"
    note = _style_words("bad") if tile.alert else f'style="{_MUTED}"'
    return (
        f'<div style="{box}"><div style="{_MUTED}">{_escape(tile.label)}</div>'
        f'<strong style="font-size: 1.45em">{_escape(tile.value)}</strong>'
        f"<div {note}>{_escape(tile.note)}</div></div>"
    )


def _iterate_end(run: RunView) -> Iterator[str]:
    """Return the memory where a line is enough for it, the log, and where the rest is."""
    if memory.is_ample(run.history, run.nodes) and (used := memory.describe(run.history, run.nodes)):
        title = "<strong>Memory limits</strong>"
        yield f'<div style="margin-top: 10px">{title} <span style="{_MUTED}">{_escape(used)}</span></div>'
    events = run.history.events
    if shown := log.select_events(events):
        yield f'<div style="margin-top: 10px"><strong>Log</strong> <span style="{_MUTED}">'
        yield f"{_escape(log.describe_shown(events))}</span></div>"
    for event in shown:
        words = _style_words("bad" if event.kind in log.URGENT_KINDS else "", "min-width: 0; overflow-wrap: anywhere")
        times = f"{log.format_clock(event)} &ensp; {event.step:,}"
        yield (
            f'<div style="display: flex; gap: 12px"><span style="flex: none; min-width: 9em; {_MUTED}">{times}</span>'
            f"<span {words}>{_escape(log.format_event(event))}</span></div>"
        )
    if len(run.history):
        yield f'<div style="margin-top: 10px; {_MUTED}"><small>{_escape(_REST)}</small></div>'


def _get_state_tone(run: RunView) -> str:
    if run.exception is not None or run.status.state is State.FAILED or "diverged" in list_title_parts(run)[3]:
        return "bad"
    if run.status.state is State.COMPLETED:
        return "" if name_bad_end(run) else "good"
    return "accent" if run.status.state is State.RUNNING else ""


def _style_notice(kind: str) -> str:
    if is_alert(kind):
        return _style_words("bad", "white-space: pre-wrap; font-weight: bold")
    if kind == "lr":
        return f'style="white-space: pre-wrap; {_MUTED}"'
    return _style_words("good" if kind in WELL_KINDS else "", "white-space: pre-wrap")


def _style_words(tone: str, style: str = "") -> str:
    """Return the attributes of words in a tone: a class, whose color is another one in a dark theme, and its color."""
    if not tone:
        return f'style="{style}"'
    parts = [part for part in (style, f"color: {COLORS[tone]}") if part]
    return f'class="dtkit-{tone}" style="{"; ".join(parts)}"'


def _escape(text: str) -> str:
    return html.escape(formatting.sanitize_text(text, 2000) if "\n" not in text else text)

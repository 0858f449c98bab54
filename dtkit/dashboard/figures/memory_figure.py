"""Memory by rank as text, as HTML and as a figure: what was measured, and hollow behind it what was planned."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.dashboard.figures.plan_figure import MEMORY_PARTS, format_html_table, set_figure_title
from dtkit.dashboard.figures.run_figure import create_figure, format_img_tag
from dtkit.dashboard.figures.style import ALERT_COLOR, MUTED_COLOR, TEXT_COLOR, style_axes
from dtkit.planning.memory_report import convert_plan_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.planning.memory_report import Memory, MemoryRow

_MEASURED_PARTS = tuple(
    part for part in MEMORY_PARTS if part[0] != "overhead"
)  # which is measured as a part of what comes and goes
_MAX_SHOWN_RANKS = 16  # ranks; of more, those that held most
_MEASURED_HEIGHT, _PLANNED_HEIGHT, _LIMIT_MARK_HALF_HEIGHT = (
    0.46,
    0.78,
    0.43,
)  # heights: of a bar, of the hollow one, and half of a limit's mark
_MAX_LIMIT_RATIO = 4.0  # a limit further off than so many bars would make them vanish
_ALT_TEXT = "memory by rank: the same numbers as bars"
_ACTIVATIONS_NOTE = (
    "activations: all that came and went while steps were taken (buffers of collectives, what malloc keeps), measured "
    "as the process's growth beyond the tensors that stay"
)
_SNAPSHOTS_NOTE = "snapshots on a rank at most, of its part and of a peer's: kept where training leaves the room"


def format_headline(memory: Memory) -> str:
    """``Memory after 8 steps of Net with Pipeline(...): 231 MB at most``."""
    how = formatting.sanitize_text(memory.strategy, 90)
    found = f"Memory after {formatting.format_count(memory.step, 'step')} of {formatting.sanitize_text(memory.name, 60)} with {how}"
    return f"{found}: {formatting.format_bytes(memory.peak)} at most" if memory.peak is not None else found


def format_text(memory: Memory) -> str:
    """The table as lines of text."""
    return "\n".join(
        [
            format_headline(memory),
            *formatting.format_columns(_format_table(memory), left_aligned=(0,)),
            *_format_notes(memory),
        ]
    )


def format_html(memory: Memory) -> str:
    """The same as HTML, with the figure."""
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in _format_notes(memory))
    shown = format_html_table(_format_table(memory)) + notes + format_img_tag(draw_figure(memory), _ALT_TEXT)
    return f"<div><p>{html.escape(format_headline(memory))}</p>{shown}</div>"


def _select_rows(memory: Memory) -> list[MemoryRow]:
    """All ranks, or of many those that held most, in order."""
    most = sorted(memory.rows, key=lambda row: row.total, reverse=True)[:_MAX_SHOWN_RANKS]
    return sorted(most, key=lambda row: row.rank)


def _format_notes(memory: Memory) -> list[str]:
    rest = len(memory.rows) - _MAX_SHOWN_RANKS
    kept = max(row.snapshots for row in memory.rows)
    besides = [f"besides, {formatting.format_bytes(kept)} of {_SNAPSHOTS_NOTE}"] if kept else []
    return [
        _ACTIVATIONS_NOTE,
        *besides,
        *([f"and {formatting.format_count(rest, 'more rank')}, which held less"] if rest > 0 else []),
    ]


def _format_table(memory: Memory) -> list[list[str]]:
    """A header, a line a rank, and below it what was planned."""
    rows = _select_rows(memory)
    limited = any(row.limit is not None for row in rows)
    body = []
    for row in rows:
        planned, limit = convert_plan_row(row), [formatting.format_bytes(row.limit)] * limited
        body.append([*_format_row(f"{row.rank}", {"peak": row.peak} | _get_measured_parts(row)), *limit])
        if planned is not None:
            body.append([*_format_row("  planned", planned), *limit])
    return [["rank", "peak", *(name for _, name, _ in _MEASURED_PARTS), *(["limit"] * limited)], *body]


def _format_row(name: str, parts: dict[str, Any]) -> list[str]:
    return [
        name,
        formatting.format_bytes(parts["peak"]),
        *(formatting.format_bytes(parts[field]) for field, _, _ in _MEASURED_PARTS),
    ]


def _get_measured_parts(row: MemoryRow) -> dict[str, int | None]:
    return {field: getattr(row, field) for field, _, _ in _MEASURED_PARTS}


# --- the figure ---------------------------------------------------------------------------------------------


def draw_figure(memory: Memory) -> Figure:
    """A bar a rank in the colours of a plan, the planned one hollow behind it, a black mark at the limit."""
    rows = _select_rows(memory)
    made = create_figure(11.0, 1.75 + 0.5 * len(rows))
    ax = made.subplots()
    planned = [convert_plan_row(row) for row in rows]
    longest = max([row.total for row in rows] + [parts["peak"] for parts in planned if parts])
    unit, one = formatting.choose_unit(longest, formatting.BYTE_UNITS)
    limits = [row.limit for row in rows if row.limit is not None]
    near = bool(limits) and max(limits) <= _MAX_LIMIT_RATIO * longest
    _draw_bars(ax, rows, planned, one)
    _annotate_bars(ax, rows, one, show_limits=near)
    ax.set_xlim(0, 1.35 * max(longest, *(limits if near else [1])) / one)
    ax.set_yticks(range(len(rows)), [f"rank {row.rank}" for row in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    _style_panel(ax, unit, "; hollow: as planned" * any(planned) + "; a black mark: the limit" * near)
    set_figure_title(made, format_headline(memory))
    return made


def _draw_bars(ax: Axes, rows: Sequence[MemoryRow], planned: Sequence[dict[str, int] | None], unit_size: float) -> None:
    there = [k for k, parts in enumerate(planned) if parts is not None]
    solid, hollow = [0.0] * len(rows), [0.0] * len(rows)
    for field, name, colour in _MEASURED_PARTS:
        sizes = [(getattr(row, field) or 0) / unit_size for row in rows]
        outline = [(parts or {}).get(field, 0) / unit_size for parts in planned]
        if not any(sizes + outline):
            continue
        ax.barh(
            there, [outline[k] for k in there], left=[hollow[k] for k in there], height=_PLANNED_HEIGHT, facecolor="white",
            edgecolor=colour, linewidth=1.6, gid="planned", zorder=1,
        )  # fmt: skip
        ax.barh(
            range(len(rows)),
            sizes,
            left=solid,
            height=_MEASURED_HEIGHT,
            color=colour,
            label=name,
            gid="measured",
            zorder=2,
        )
        solid = [a + b for a, b in zip(solid, sizes, strict=True)]
        hollow = [a + b for a, b in zip(hollow, outline, strict=True)]


def _annotate_bars(ax: Axes, rows: Sequence[MemoryRow], unit_size: float, *, show_limits: bool) -> None:
    """The numbers beside the bars; and the limits, where they are not so far off that bars would vanish."""
    for k, row in enumerate(rows):
        limit = row.limit if show_limits else None
        planned = row.planned.needed if row.planned is not None else None
        words = formatting.format_bytes(row.peak) if row.peak is not None else "no step yet"
        words += f" (planned {formatting.format_bytes(planned)})" if planned is not None else ""
        over = row.limit is not None and row.total > row.limit
        ax.annotate(
            words, (max(row.total, planned or 0, limit or 0) / unit_size, k), xytext=(7, 0), textcoords="offset points",
            va="center", fontsize=8, color=ALERT_COLOR if over else TEXT_COLOR,
        )  # fmt: skip
        if limit is not None:
            ax.plot(
                [limit / unit_size] * 2,
                [k - _LIMIT_MARK_HALF_HEIGHT, k + _LIMIT_MARK_HALF_HEIGHT],
                color=TEXT_COLOR,
                linewidth=2.2,
                gid="limit",
                zorder=3,
            )


def _style_panel(ax: Axes, unit: str, note: str) -> None:
    from matplotlib.ticker import StrMethodFormatter

    style_axes(ax, "x", TEXT_COLOR)
    ax.set_title("Held at most by each rank", loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOR)
    ax.set_title(unit + note, loc="right", fontsize=8, color=MUTED_COLOR)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(_MEASURED_PARTS), fontsize=8, frameon=False)

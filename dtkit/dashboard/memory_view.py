"""Memory by rank as text, as HTML and as a figure: what was measured, and hollow behind it what was planned."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.dashboard.axes import ALERT, INK, MUTED, tidy
from dtkit.dashboard.figures import image, new_figure
from dtkit.dashboard.plan_view import PARTS, entitle, html_table
from dtkit.planning.memory_report import convert_plan_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.planning.memory_report import Memory, MemoryRow

_PARTS = tuple(part for part in PARTS if part[0] != "overhead")  # which is measured as a part of what comes and goes
_SHOWN = 16  # ranks; of more, those that held most
_MEASURED, _PLANNED, _MARK = 0.46, 0.78, 0.43  # heights: of a bar, of the hollow one, and half of a limit's mark
_NEAR = 4.0  # a limit further off than so many bars would make them vanish
_ALT = "memory by rank: the same numbers as bars"
_NOTE = (
    "activations: all that came and went while steps were taken (buffers of collectives, what malloc keeps), measured "
    "as the process's growth beyond the tensors that stay"
)
_SNAPSHOTS = "snapshots on a rank at most, of its part and of a peer's: kept where training leaves the room"


def headline(memory: Memory) -> str:
    """``Memory after 8 steps of Net with Pipeline(...): 231 MB at most``."""
    how = formatting.plain(memory.strategy, 90)
    found = f"Memory after {formatting.plural(memory.step, 'step')} of {formatting.plain(memory.name, 60)} with {how}"
    return f"{found}: {formatting.size(memory.peak)} at most" if memory.peak is not None else found


def text(memory: Memory) -> str:
    """The table as lines of text."""
    return "\n".join([headline(memory), *formatting.columns(_table(memory), left=(0,)), *_notes(memory)])


def page(memory: Memory) -> str:
    """The same as HTML, with the figure."""
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in _notes(memory))
    shown = html_table(_table(memory)) + notes + image(figure(memory), _ALT)
    return f"<div><p>{html.escape(headline(memory))}</p>{shown}</div>"


def _listed(memory: Memory) -> list[MemoryRow]:
    """All ranks, or of many those that held most, in order."""
    most = sorted(memory.rows, key=lambda row: row.total, reverse=True)[:_SHOWN]
    return sorted(most, key=lambda row: row.rank)


def _notes(memory: Memory) -> list[str]:
    rest = len(memory.rows) - _SHOWN
    kept = max(row.snapshots for row in memory.rows)
    besides = [f"besides, {formatting.size(kept)} of {_SNAPSHOTS}"] if kept else []
    return [_NOTE, *besides, *([f"and {formatting.plural(rest, 'more rank')}, which held less"] if rest > 0 else [])]


def _table(memory: Memory) -> list[list[str]]:
    """A header, a line a rank, and below it what was planned."""
    rows = _listed(memory)
    limited = any(row.limit is not None for row in rows)
    body = []
    for row in rows:
        planned, limit = convert_plan_row(row), [formatting.size(row.limit)] * limited
        body.append([*_cells(f"{row.rank}", {"peak": row.peak} | _measured(row)), *limit])
        if planned is not None:
            body.append([*_cells("  planned", planned), *limit])
    return [["rank", "peak", *(name for _, name, _ in _PARTS), *(["limit"] * limited)], *body]


def _cells(name: str, parts: dict[str, Any]) -> list[str]:
    return [name, formatting.size(parts["peak"]), *(formatting.size(parts[field]) for field, _, _ in _PARTS)]


def _measured(row: MemoryRow) -> dict[str, int | None]:
    return {field: getattr(row, field) for field, _, _ in _PARTS}


# --- the figure ---------------------------------------------------------------------------------------------


def figure(memory: Memory) -> Figure:
    """A bar a rank in the colours of a plan, the planned one hollow behind it, a black mark at the limit."""
    rows = _listed(memory)
    made = new_figure(11.0, 1.75 + 0.5 * len(rows))
    ax = made.subplots()
    planned = [convert_plan_row(row) for row in rows]
    longest = max([row.total for row in rows] + [parts["peak"] for parts in planned if parts])
    unit, one = formatting.unit_for(longest, formatting.BYTES)
    limits = [row.limit for row in rows if row.limit is not None]
    near = bool(limits) and max(limits) <= _NEAR * longest
    _draw(ax, rows, planned, one)
    _write(ax, rows, one, near=near)
    ax.set_xlim(0, 1.35 * max(longest, *(limits if near else [1])) / one)
    ax.set_yticks(range(len(rows)), [f"rank {row.rank}" for row in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    _tidy(ax, unit, "; hollow: as planned" * any(planned) + "; a black mark: the limit" * near)
    entitle(made, headline(memory))
    return made


def _draw(ax: Axes, rows: Sequence[MemoryRow], planned: Sequence[dict[str, int] | None], one: float) -> None:
    there = [k for k, parts in enumerate(planned) if parts is not None]
    solid, hollow = [0.0] * len(rows), [0.0] * len(rows)
    for field, name, colour in _PARTS:
        sizes = [(getattr(row, field) or 0) / one for row in rows]
        outline = [(parts or {}).get(field, 0) / one for parts in planned]
        if not any(sizes + outline):
            continue
        ax.barh(
            there, [outline[k] for k in there], left=[hollow[k] for k in there], height=_PLANNED, facecolor="white",
            edgecolor=colour, linewidth=1.6, gid="planned", zorder=1,
        )  # fmt: skip
        ax.barh(
            range(len(rows)), sizes, left=solid, height=_MEASURED, color=colour, label=name, gid="measured", zorder=2
        )
        solid = [a + b for a, b in zip(solid, sizes, strict=True)]
        hollow = [a + b for a, b in zip(hollow, outline, strict=True)]


def _write(ax: Axes, rows: Sequence[MemoryRow], one: float, *, near: bool) -> None:
    """The numbers beside the bars; and the limits, where they are not so far off that bars would vanish."""
    for k, row in enumerate(rows):
        limit = row.limit if near else None
        planned = row.planned.needed if row.planned is not None else None
        words = formatting.size(row.peak) if row.peak is not None else "no step yet"
        words += f" (planned {formatting.size(planned)})" if planned is not None else ""
        over = row.limit is not None and row.total > row.limit
        ax.annotate(
            words, (max(row.total, planned or 0, limit or 0) / one, k), xytext=(7, 0), textcoords="offset points",
            va="center", fontsize=8, color=ALERT if over else INK,
        )  # fmt: skip
        if limit is not None:
            ax.plot([limit / one] * 2, [k - _MARK, k + _MARK], color=INK, linewidth=2.2, gid="limit", zorder=3)


def _tidy(ax: Axes, unit: str, note: str) -> None:
    from matplotlib.ticker import StrMethodFormatter

    tidy(ax, "x", INK)
    ax.set_title("Held at most by each rank", loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_title(unit + note, loc="right", fontsize=8, color=MUTED)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(_PARTS), fontsize=8, frameon=False)

"""Memory by rank as text and as HTML: measured, and planned below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.text.numbers import describe_remaining
from dtkit.dashboard.text.plan_text import MEMORY_PARTS
from dtkit.dashboard.text.table_page import TablePage
from dtkit.planning.memory_report import convert_plan_row

if TYPE_CHECKING:
    from dtkit.planning.memory_report import Memory, MemoryRow

MEASURED_PARTS = tuple(part for part in MEMORY_PARTS if part[0] != "overhead")
"""Parts that can be measured. The overhead is measured as a part of the activations."""

_MAX_SHOWN_RANKS = 16  # of more ranks, those that held most are shown
_ACTIVATIONS_NOTE = (
    "activations: all temporary memory of steps (with buffers of collectives, and what malloc keeps), measured as the "
    "process's growth beyond the tensors that stay"
)
_SNAPSHOTS_NOTE = "snapshots on a node at most, of its part and of a peer's: kept where training leaves the room"


def format_text(memory: Memory) -> str:
    """Return the table as text."""
    return _make_page(memory).to_text()


def format_html(memory: Memory) -> str:
    """Return the table as HTML."""
    return _make_page(memory).to_html()


def format_headline(memory: Memory) -> str:
    """Return a headline such as ``Memory after 8 steps of Net with Pipeline(...): 231 MB at most``."""
    steps = formatting.format_count(memory.step, "step")
    name, strategy = formatting.sanitize_text(memory.name, 60), formatting.sanitize_text(memory.strategy, 90)
    peak = "" if memory.peak is None else f": {formatting.format_bytes(memory.peak)} at most"
    return f"Memory after {steps} of {name} with {strategy}{peak}"


def select_rows(memory: Memory) -> list[MemoryRow]:
    """Return the rows of all ranks, or of many ranks those that held most, by rank."""
    largest = sorted(memory.rows, key=lambda row: row.total, reverse=True)[:_MAX_SHOWN_RANKS]
    return sorted(largest, key=lambda row: row.rank)


def _make_page(memory: Memory) -> TablePage:
    return TablePage(format_headline(memory), [_make_table(memory)], _format_notes(memory))


def _format_notes(memory: Memory) -> list[str]:
    snapshots = max(row.snapshots for row in memory.rows)
    return [
        _ACTIVATIONS_NOTE,
        *([f"besides, {formatting.format_bytes(snapshots)} of {_SNAPSHOTS_NOTE}"] if snapshots else []),
        *(f"{note}, which held less" for note in describe_remaining(len(memory.rows), "node", _MAX_SHOWN_RANKS)),
    ]


def _make_table(memory: Memory) -> Table:
    """Make a table with a line for each rank, and below it a line for its plan."""
    memory_rows = select_rows(memory)
    has_limits = any(row.limit is not None for row in memory_rows)
    lines = []
    for row in memory_rows:
        planned, limit = convert_plan_row(row), [formatting.format_bytes(row.limit)] * has_limits
        measured = {"peak": row.peak} | {field: getattr(row, field) for field, _ in MEASURED_PARTS}
        lines.append([*_format_row(f"{row.rank}", measured), *limit])
        if planned is not None:
            lines.append([*_format_row("  planned", planned), *limit])
    header = ["node", "peak", *(name for _, name in MEASURED_PARTS), *(["limit"] * has_limits)]
    return Table(header, lines, {"node"})


def _format_row(name: str, parts: dict[str, Any]) -> list[str]:
    fields = ["peak", *(field for field, _ in MEASURED_PARTS)]
    return [name, *(formatting.format_bytes(parts[field]) for field in fields)]

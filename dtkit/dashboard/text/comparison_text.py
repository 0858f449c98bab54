"""The table of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.summary.comparison import FINAL_LOSS_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.dashboard.summary.comparison import ComparisonRow

NUMBER_COLUMNS = ("nodes", "steps", "final loss", "sent per rank", "per step", "samples/s", "time")
TABLE_NOTE = (
    f"final loss: mean of the last {FINAL_LOSS_STEPS} steps; bytes: sent by one rank; time: without that between "
    "dispatches"
)


def make_table(rows: Sequence[ComparisonRow]) -> Table:
    """Return the table. It has no column for strategies where the labels are the strategies."""
    has_strategies = any(row.strategy != row.label for row in rows)
    text_columns = ("run", "strategy") if has_strategies else ("run",)
    lines = []
    for row in rows:
        strategy = [row.strategy or formatting.UNKNOWN] if has_strategies else []
        lines.append([row.label, *strategy, *format_numbers(row)])
    return Table([*text_columns, *NUMBER_COLUMNS], lines, text_columns)


def describe_rows(rows: Sequence[ComparisonRow]) -> str:
    """Return loss and bytes of each run as a sentence."""
    parts = (
        f"{row.label}: loss {formatting.format_loss(row.loss)}, {formatting.format_bytes(row.sent_bytes)} sent"
        for row in rows
    )
    return f"Loss against steps and against bytes. {'; '.join(parts)}"


def format_numbers(row: ComparisonRow) -> tuple[str, ...]:
    """Return the cells of :data:`NUMBER_COLUMNS`."""
    return (
        f"{row.nodes:,}",
        f"{row.steps:,}",
        formatting.format_loss(row.loss) if row.steps else formatting.UNKNOWN,
        formatting.format_bytes(row.sent_bytes),
        formatting.format_bytes(row.bytes_per_step),
        formatting.format_rate(row.samples_per_s),
        formatting.format_duration(row.seconds),
    )

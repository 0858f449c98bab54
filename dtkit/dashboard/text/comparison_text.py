"""The table of a comparison."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.summary.comparison import (
    BROKEN_STATES,
    DURATION,
    KEPT_STATE,
    LOSS,
    NOT_VERIFIED,
    TRAINING_DATA,
    VALIDATION_DATA,
    differ_in,
    differ_in_bytes,
    join_directions,
)
from dtkit.history.mean_loss import FINAL_LOSS_STEPS
from dtkit.history.metric_direction import has_direction, is_better_higher, is_better_lower
from dtkit.history.speed import STEADY_SECONDS, WHOLE_RUN_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.dashboard.summary.comparison import ComparisonRow

FINAL_LOSS, BEST_PREFIX = "final training loss", "best validation "
"""Column of the training loss, and the beginning of each column of a validation metric."""
NUMBER_COLUMNS = (
    "nodes",
    "steps",
    FINAL_LOSS,
    "sent per node",
    "per step",
    "samples/s",
    "time in steps",
    "duration",
)
VERIFIED = "verified"
"""Column of the results of ``run.verify()``, if some run has one."""
_USUAL_STATES = {"completed", KEPT_STATE}
_FASTER_RATIO = 1.03
_LONGER_RATIO, _LONGER_SECONDS = 1.05, 0.1  # from which a duration is more than the time in steps
_BYTE_COLUMNS = ("sent per node", "per step")
_UNCOMPARED_COLUMNS = ("nodes", "steps")  # whose differences are read at a glance
_WHOLE_RUN_COLUMNS = ("sent per node", "time in steps", "duration")  # which grow as long as a run goes on
_MANY_TIMES, _MOST_TIMES = 10.0, 1e6  # between which a ratio is told instead of a percentage
_LEAST_SHARE = 0.01  # down to which a percentage is told: it has two digits at most


def make_table(rows: Sequence[ComparisonRow]) -> Table:
    """Return the table. It has only columns in which runs differ, or that every comparison needs; the best is bold.

    States are shown unless all runs are completed. There are no bytes where all runs sent the same.

    Strategies that differ are in :func:`make_differences_table`.
    """
    hidden = [
        *(() if differ_in_bytes(rows) else _BYTE_COLUMNS),
        *(
            ["time in steps"]
            if all(row.seconds < _LONGER_RATIO * row.steps_s + _LONGER_SECONDS for row in rows)
            else []
        ),
        *(["nodes"] if len({r.nodes for r in rows}) == 1 else []),
    ]
    metrics = list(dict.fromkeys(name for row in rows for name in row.best))
    numbers = [name for name in NUMBER_COLUMNS if name not in hidden]
    split = numbers.index(FINAL_LOSS) + 1
    has_states = bool({row.state for row in rows} - _USUAL_STATES)
    first = ["run", *(["state"] if has_states else [])]
    last = [VERIFIED] if any(row.verified != NOT_VERIFIED for row in rows) else []
    header = [*first, *numbers[:split], *(f"{BEST_PREFIX}{name}" for name in metrics), *numbers[split:], *last]
    final = formatting.format_losses([row.loss if row.steps else None for row in rows])
    best_columns = [formatting.format_losses([row.best.get(name) for row in rows]) for name in metrics]
    lines = []
    for k, row in enumerate(rows):
        cells = [cell for name, cell in zip(NUMBER_COLUMNS, format_numbers(row), strict=True) if name not in hidden]
        cells[split - 1], best = final[k], [column[k] for column in best_columns]
        state = [row.state] if has_states else []
        verified = [row.verified] if last else []
        lines.append([row.label, *state, *cells[:split], *best, *cells[split:], *verified])
    values = _list_values(rows, header)
    bold, changes = _find_best_cells(rows, header, lines, metrics), _describe_changes(rows, header, values)
    stated = join_directions(rows)
    high = ["samples/s", *(f"{BEST_PREFIX}{name}" for name in metrics if is_better_higher(name, stated))]
    texts = {"run", "state", VERIFIED}
    return Table(header, lines, texts, bold, values=values, small_texts=changes, high_columns=high)


def _list_values(rows: Sequence[ComparisonRow], header: Sequence[str]) -> dict[tuple[int, int], float]:
    """Return the numbers that are known, by their cells (row, column)."""
    values = {}
    for k, row in enumerate(rows):
        known = list_numbers(row)
        values.update({(k, header.index(name)): value for name, value in known.items() if name in header})
    return {cell: float(value) for cell, value in values.items() if math.isfinite(value)}


def _describe_changes(
    rows: Sequence[ComparisonRow], header: Sequence[str], values: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], str]:
    """Return the differences from the first run by cell, where both numbers mean the same."""
    changes = {}
    for (row, column), value in values.items():
        if row and (0, column) in values and _is_comparable((rows[0], rows[row]), header[column]):
            changes[row, column] = _describe_change(values[0, column], value)
    return {cell: text for cell, text in changes.items() if text}


def _is_comparable(pair: Sequence[ComparisonRow], column: str) -> bool:
    """Return whether the numbers of two runs may be compared: no error ended them, and they did the same for it."""
    if column in _UNCOMPARED_COLUMNS or not all(row.competes for row in pair) or list_unequal_bases(pair, column):
        return False
    is_over = all(row.state in _USUAL_STATES for row in pair) and not differ_in(pair, DURATION)
    return is_over or column not in _WHOLE_RUN_COLUMNS


def _describe_change(first: float, value: float) -> str:
    """Return a difference such as ``+3 %``, or a ratio such as ``12 times`` or ``1/120``.

    It is empty where it has no meaning, as for a loss that diverged, or would be zero.
    """
    if first <= 0 or value < 0:
        return ""
    ratio = value / first
    if not 1 / _MOST_TIMES <= ratio <= _MOST_TIMES and value:
        return ""
    if ratio >= _MANY_TIMES:
        return f"{formatting.format_rate(ratio)} times"
    if 0 < ratio < _LEAST_SHARE:
        return f"1/{1 / ratio:,.0f}"
    change = formatting.format_percent(abs(ratio - 1))
    sign = "+" if ratio > 1 else "\N{MINUS SIGN}"
    return "" if change == formatting.format_percent(0) else sign + change


def _find_best_cells(
    rows: Sequence[ComparisonRow], header: Sequence[str], lines: Sequence[Sequence[str]], metrics: Sequence[str]
) -> list[tuple[int, int]]:
    """Return the cells (row, column) of the best runs in each column that has a better and a worse.

    Runs that failed or diverged don't compete: a crash in the first steps would be the fastest. Columns whose numbers
    mean different things in different runs have no best. Numbers that read alike in the table's `lines` are equal.
    """
    stated = join_directions(rows)
    keys: dict[str, list[float]] = {
        FINAL_LOSS: [-row.loss for row in rows],
        "samples/s": _drop_equal_speeds(
            [row.samples_per_s if row.competes and row.steps_s >= STEADY_SECONDS else math.nan for row in rows]
        ),
        **{
            f"{BEST_PREFIX}{name}": [
                (-1 if is_better_lower(name, stated) else 1) * row.best.get(name, math.nan) for row in rows
            ]
            for name in metrics
            if has_direction(name, stated)
        },
    }
    cells = []
    for name, all_values in keys.items():
        if list_unequal_bases(rows, name):
            continue
        values = [value if row.competes else math.nan for row, value in zip(rows, all_values, strict=True)]
        known, column = [row for row, value in enumerate(values) if math.isfinite(value)], list(header).index(name)
        best_text = next((lines[row][column] for row in known if values[row] == max(values[k] for k in known)), "")
        best = [row for row in known if lines[row][column] == best_text]
        if len(best) < len(known):  # else all are equal
            cells += [(row, column) for row in best]
    return cells


def list_unequal_bases(rows: Sequence[ComparisonRow], column: str) -> list[str]:
    """Return in what runs differ that makes the numbers of a column incomparable."""
    needed = {
        FINAL_LOSS: [LOSS, TRAINING_DATA],
        "best validation loss": [LOSS, VALIDATION_DATA],
    }.get(column, [VALIDATION_DATA] if column.startswith(BEST_PREFIX) else [])
    return [name for name in needed if differ_in(rows, name)]


def describe_limits(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return a line on columns without a best, and one on runs that trained for different numbers of epochs."""
    metrics = dict.fromkeys(f"{BEST_PREFIX}{name}" for row in rows for name in row.best)
    columns = [name for name in [FINAL_LOSS, *metrics] if list_unequal_bases(rows, name)]
    bases = dict.fromkeys(basis for name in columns for basis in list_unequal_bases(rows, name))
    lines = []
    if columns:
        lines.append(
            f"the runs differ in {' and '.join(bases)}, so there is no best {' or '.join(columns).replace('best ', '')}"
        )
    if differ_in(rows, DURATION):
        lines.append("the runs differ in epochs: the best may be the one that trained longest")
    return lines


def _drop_equal_speeds(speeds: list[float]) -> list[float]:
    """Return no speeds where the runs are equally fast: their small differences are those of a busy machine."""
    known = [speed for speed in speeds if math.isfinite(speed)]
    return speeds if known and max(known) >= _FASTER_RATIO * min(known) else [math.nan] * len(speeds)


def explain_columns(table: Table, rows: Sequence[ComparisonRow]) -> list[str]:
    """Return what the numbers of the table's columns are, such as ``time in steps: all but the first``."""
    short = "; all of them where a run has fewer" if any(row.steps < FINAL_LOSS_STEPS for row in rows) else ""
    parts = [f"{FINAL_LOSS}: mean of the last {FINAL_LOSS_STEPS} steps{short}"]
    if any(row.best for row in rows):
        parts.append("best validation: the best of a run's evaluations, on the rows of validation=")
    if "per step" in table.header:
        parts.append("sent per node, per step: bytes that one node sent")
    too_short = "; too short for a best where they took less than a second"
    is_any_short = any(row.steps_s < STEADY_SECONDS for row in rows)
    parts.append(f"samples/s: of all nodes, in {WHOLE_RUN_STEPS}{too_short if is_any_short else ''}")
    if "time in steps" in table.header:
        parts.append("time in steps: all but the first")
    parts.append("duration: all steps and the time between them, without pauses")
    if VERIFIED in table.header:
        parts.append("verified: run.verify() and the largest difference to one process")
    return parts


def list_table_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return what limits the comparison, and a line on what the table's columns, bold cells and small texts are."""
    table = make_table(rows)
    parts = explain_columns(table, rows)
    if table.bold_cells:
        is_open = all(row.competes for row in rows)
        parts.append(f"bold: the best{'' if is_open else ' of the runs that did not fail, diverge or learn nothing'}")
    if table.small_texts:
        parts.append(f"below a number: {_describe_basis(rows[0], f'run {rows[0].number}')}")
    return [*describe_limits(rows), " · ".join(parts)]


def format_text(rows: Sequence[ComparisonRow], max_width: int = 0) -> str:
    """Return the table as text, and below it the best runs, what limits the comparison, and a key of the columns."""
    table = make_table(rows)
    alike = {(row, k): text for (row, k), text in table.small_texts.items() if table.rows[row][k] == table.rows[0][k]}
    lines = [
        [f"{cell} ({alike[row, k]})" if (row, k) in alike else cell for k, cell in enumerate(cells)]
        for row, cells in enumerate(table.rows)
    ]
    shown = dataclasses.replace(table, rows=lines).to_text(max_width=max_width)
    notes = [*describe_best(table), *describe_limits(rows), *describe_ends(rows)]
    key = explain_columns(table, rows)
    if alike:
        key.append(f"in brackets: {_describe_basis(rows[0], rows[0].label)}")
    return "\n".join([shown, *notes, "", *key])


def _describe_basis(first: ComparisonRow, name: str) -> str:
    """Return from which run the differences are: the first of the table, which is another one if it is sorted."""
    return f"the difference from {'the first run' if first.number == 1 else name}"


def number_names(names: Sequence[str]) -> list[str]:
    """Return the names of the runs with their numbers, as a page and its charts have them: ``2: lr 0.1``."""
    return [f"{number}: {name}" for number, name in enumerate(names, 1)]


def number_rows(rows: Sequence[ComparisonRow], names: Sequence[str]) -> list[ComparisonRow]:
    """Return the rows of a page in their order, with numbers. `names` are in the order of the runs."""
    labels = number_names(names)
    return [dataclasses.replace(row, label=labels[row.number - 1]) for row in rows]


def describe_ends(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return a line for each run that ended badly, with the cause: ``lr 1.0 failed: ValueError: ...``."""
    return [
        f"{row.label} {row.state if row.state in BROKEN_STATES else row.failure}: {row.cause}"
        for row in rows
        if row.failure
    ]


def describe_best(table: Table) -> list[str]:
    """Return a line with the best run of each column, for texts, which have no bold cells; nothing without one."""
    columns: dict[int, list[int]] = {}
    for row, column in sorted(table.bold_cells):
        columns.setdefault(column, []).append(row)
    parts = [
        f"{table.header[column].removeprefix('best ')} {' and '.join(table.rows[row][0] for row in rows)} "
        f"({table.rows[rows[0]][column]})"
        for column, rows in sorted(columns.items())
    ]
    return [f"best: {', '.join(parts)}"] if parts else []


def make_differences_table(
    labels: Sequence[str], differences: Sequence[tuple[str, ...]], order: Sequence[int]
) -> Table:
    """Return the table of the settings in which the runs differ, turned so that it has few columns.

    `labels` and `differences` are in the order of the runs, and the table in the `order` of the other tables.
    """
    header, *rows = ([name, *(texts[k] for k in order)] for name, *texts in [("setting", *labels), *differences])
    if len(differences) < len(labels):
        (_, *names), *rows = ([*column] for column in zip(header, *rows, strict=True))
        header = ["run", *names]
    return Table(header, rows, set(header))


def describe_rows(rows: Sequence[ComparisonRow]) -> str:
    """Return loss and bytes of each run as a sentence."""
    parts = (
        f"{row.label}: loss {formatting.format_loss(row.loss)}, {formatting.format_bytes(row.sent_bytes)} sent"
        for row in rows
    )
    axes = "steps, time and bytes" if differ_in_bytes(rows) else "steps and time"
    return f"Loss against {axes}. {'; '.join(parts)}"


def format_numbers(row: ComparisonRow) -> tuple[str, ...]:
    """Return the cells of :data:`NUMBER_COLUMNS`."""
    return (
        f"{row.nodes:,}",
        f"{row.steps:,}",
        formatting.format_loss(row.loss) if row.steps else formatting.UNKNOWN,
        formatting.format_bytes(row.sent_bytes),
        formatting.format_bytes(row.bytes_per_step),
        formatting.format_rate(row.samples_per_s),
        formatting.format_duration(row.steps_s),
        formatting.format_run_time(row.seconds),
    )


def list_numbers(row: ComparisonRow) -> dict[str, float]:
    """Return the numbers of a run by their columns: those of :data:`NUMBER_COLUMNS`, then the best of each metric.

    Sizes are in bytes, and times in seconds.
    """
    loss = row.loss if row.steps else math.nan
    totals = (row.sent_bytes, row.bytes_per_step, row.samples_per_s, row.steps_s, row.seconds)
    numbers = dict(zip(NUMBER_COLUMNS, (row.nodes, row.steps, loss, *totals), strict=True))
    return numbers | {f"{BEST_PREFIX}{name}": value for name, value in row.best.items()}

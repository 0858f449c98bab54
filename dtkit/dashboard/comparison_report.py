"""A comparison as one HTML file: the table, the settings, and charts that can be zoomed."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.line_samples import format_report_sample
from dtkit.dashboard.report_charts import list_metric_names
from dtkit.dashboard.report_live import format_comparison_charts
from dtkit.dashboard.report_page import escape, fold_facts, format_description, format_notice, format_page, format_table
from dtkit.dashboard.summary.comparison import (
    end_line,
    find_exits,
    find_loss_cap,
    find_metric_cap,
    list_shared_scalars,
    read_rates,
    read_scalar,
)
from dtkit.dashboard.summary.run_lines import choose_dash
from dtkit.dashboard.summary.series_names import MAX_TITLE_CHARS
from dtkit.dashboard.summary.short_batches import SHORT_BATCH_NOTE, compute_drawn_losses, find_short_batches
from dtkit.dashboard.svg_chart import Series, draw_chart
from dtkit.dashboard.text.comparison_order import make_sorted_table
from dtkit.dashboard.text.comparison_text import (
    describe_ends,
    list_table_notes,
    make_differences_table,
    number_names,
    number_rows,
)
from dtkit.dashboard.written_report import WrittenReport, check_description, check_folder
from dtkit.history.speed import read_step_ends

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.dashboard.live.comparison_messages import ComparisonView
    from dtkit.history.history import History


def write_comparison_report(comparison: ComparisonView, path: str | Path, description: str = "") -> WrittenReport:
    """Write the report to `path`, whose folder exists, with the user's `description` below the title."""
    check_folder(path)
    check_description(description)
    title = f"Comparison of {formatting.format_count(len(comparison.short_names), 'run')}"
    Path(path).write_text(format_page(title, _format_parts(comparison, title, description)), encoding="utf-8")
    return WrittenReport(title, path)


def _format_parts(comparison: ComparisonView, title: str, description: str) -> Iterator[str]:
    yield f'<h1>{escape(title)}</h1><p class="lead">Written <time>{time.strftime("%Y-%m-%d %H:%M")}</time>.</p>'
    yield format_description(description)
    rows = number_rows(comparison.rows, comparison.short_names)
    labels = number_names(comparison.short_names)
    samples = [format_report_sample(row.number - 1) for row in rows]
    table = make_sorted_table(rows, comparison.sort_column)
    yield format_table(dataclasses.replace(table, row_marks=samples), "sortable" if len(rows) > 1 else "")
    yield "".join(format_notice(line, is_alert=True) for line in describe_ends(rows))
    yield f"<p><small>{'<br>'.join(escape(line) for line in list_table_notes(rows))}</small></p>"
    if comparison.differences:
        yield "<h2>Settings that differ</h2>"
        yield format_table(make_differences_table(labels, comparison.differences, comparison.order), "follows")
    if comparison.common:
        yield "<h2>Settings that all runs share</h2>"
        yield fold_facts(formatting.format_count(len(comparison.common), "setting"), Table((), comparison.common))
    charts = "".join(_iterate_charts(labels, comparison.histories, comparison.order))
    yield "<h2>Charts</h2>"
    if any(find_short_batches(history.totals()).any() for history in comparison.histories):
        yield f"<p><small>{SHORT_BATCH_NOTE[0].upper()}{SHORT_BATCH_NOTE[1:]}.</small></p>"
    yield format_comparison_charts(comparison, f'<div class="charts">{charts}</div>')


def _iterate_charts(labels: Sequence[str], histories: Sequence[History], order: Sequence[int]) -> Iterator[str]:
    """Yield the charts. Each legend has the runs in this `order`, in the colors of their places in `histories`."""

    def draw(title: str, note: str, lines: Sequence[Series], **formats: Any) -> str:
        return draw_chart(title, note, [lines[k] for k in order], **formats)

    runs = list(zip(range(len(labels)), labels, histories, strict=True))
    totals = [history.totals() for history in histories]
    cap = find_loss_cap([compute_drawn_losses(part) for part in totals])
    exits = find_exits(histories)
    losses = [
        Series(
            label, part["step"], end_line(part["step"], compute_drawn_losses(part), step),
            color=k, dash=choose_dash(k),
        )
        for (k, label, _), part, step in zip(runs, totals, exits, strict=True)
    ]  # fmt: skip
    shown, note = _leave_out(losses, cap)
    yield draw(
        "Loss against steps", f"mean over all nodes{note}", shown, format_y=formatting.format_loss, may_be_log=True
    )
    times = [read_step_ends(history) for history in histories]
    yield draw(
        "Loss against time", f"of steps{note}",
        [dataclasses.replace(line, x=x) for line, x in zip(shown, times, strict=True)],
        format_y=formatting.format_loss, x_name="time",
        format_x=lambda x: formatting.format_duration(x) if x else "0", may_be_log=True,
    )  # fmt: skip
    rates = [
        Series(label, *read_rates(part), color=k, dash=choose_dash(k))
        for (k, label, _), part in zip(runs, totals, strict=True)
    ]
    yield draw("Throughput", "samples/s of all nodes", rates, format_y=formatting.format_rate, from_zero=True)
    for name in dict.fromkeys(name for history in histories for name in ["loss", *list_metric_names(history)]):
        points = [_make_metric_series(label, history, name, k) for k, label, history in runs]
        if name == "loss":
            points = [
                dataclasses.replace(line, y=end_line(line.x, line.y, step))
                for line, step in zip(points, exits, strict=True)
            ]
        shown, note = _leave_out(points, find_metric_cap(histories, name))
        title = f"Validation {formatting.sanitize_text(name, MAX_TITLE_CHARS)}"
        yield draw(title, note.removeprefix("; "), shown, format_y=formatting.format_loss)
    for name in list_shared_scalars(histories):
        logged = [
            Series(label, *read_scalar(history, name), color=k, dash=choose_dash(k)) for k, label, history in runs
        ]
        title = formatting.sanitize_text(name, MAX_TITLE_CHARS)
        yield draw(title, "logged, mean over all nodes", logged, format_y=formatting.format_loss)


def _leave_out(lines: Sequence[Series], cap: float | None) -> tuple[list[Series], str]:
    """Return the lines up to a cap, with a note: a run that diverges would make the others flat lines."""
    if cap is None:
        return list(lines), ""
    kept = [dataclasses.replace(line, y=np.where(line.y <= cap, line.y, np.nan)) for line in lines]
    return kept, f"; above {formatting.format_loss(cap)} left out"


def _make_metric_series(label: str, history: History, name: str, color: int) -> Series:
    points = [(e.step, e.values[name]) for e in history.evaluations if e.values.get(name) is not None]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return Series(label, steps, values, color, exact=True, dash=choose_dash(color))

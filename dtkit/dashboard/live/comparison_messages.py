"""Messages to the page of a comparison: each has the whole view, some kilobytes for each run.

All runs have buckets of the same width, so that a point of the axis means the same in each.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.live.comparison_series import (
    LOGGED_PREFIX,
    MAX_SCALARS,
    RATE,
    describe_axes,
    find_last_step,
    list_metric_names,
    make_metric_series,
    make_rate_series,
    make_scalar_series,
    make_time_series,
)
from dtkit.dashboard.live.messages import Message
from dtkit.dashboard.summary.activity import read_state
from dtkit.dashboard.summary.comparison import (
    MEAN_LOSS,
    NUM_LOSS_BUCKETS,
    describe_exits,
    end_line,
    find_exits,
    find_loss_cap,
    find_metric_cap,
    list_shared_scalars,
)
from dtkit.dashboard.summary.curves import Curves
from dtkit.dashboard.summary.short_batches import SHORT_BATCH_NOTE, compute_drawn_losses, find_short_batches
from dtkit.dashboard.summary.value_scale import is_steep
from dtkit.dashboard.text.comparison_order import make_sorted_table
from dtkit.dashboard.text.comparison_text import describe_ends, list_table_notes, make_differences_table, number_rows
from dtkit.history.speed import read_step_ends

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit._util.table import Table
    from dtkit.dashboard.summary.comparison import ComparisonRow
    from dtkit.history.history import History


class ComparisonView(Protocol):
    """All that the live view reads of a comparison."""

    @property
    def histories(self) -> Sequence[History]:
        """The histories, in the order of the runs."""
        ...

    @property
    def runs(self) -> Sequence[object]:
        """The runs, or the histories that were given."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The whole names of the runs."""
        ...

    @property
    def short_names(self) -> Sequence[str]:
        """Short names of the runs, of which some may be equal."""
        ...

    @property
    def rows(self) -> list[ComparisonRow]:
        """A row for each run, as of now, in the order of the tables."""
        ...

    @property
    def order(self) -> Sequence[int]:
        """Places of the runs in the order of the tables."""
        ...

    @property
    def sort_column(self) -> str:
        """The column of the table that the order is from; "" is none."""
        ...

    @property
    def differences(self) -> list[tuple[str, ...]]:
        """The settings in which the runs differ: (setting, its text in each run)."""
        ...

    @property
    def common(self) -> list[tuple[str, str]]:
        """The settings that all runs share: (setting, its text)."""
        ...

    def make_mime_bundle(self) -> dict[str, str]:
        """Return the output for a saved notebook."""
        ...


class ComparisonMessageBuilder:
    """Builds messages about a comparison. Not thread-safe: one caller at a time."""

    def __init__(self, comparison: ComparisonView) -> None:
        self._comparison = comparison
        self._curves = [Curves((MEAN_LOSS,), 1, NUM_LOSS_BUCKETS) for _ in comparison.histories]
        self._seq = 0

    def build_snapshot(self) -> Message:
        """Return everything that a page needs, in the form of a run's snapshot, so that the same store reads it."""
        self._seq += 1
        values, width, origin = self._align_curves()
        histories = self._comparison.histories
        ends = [1e3 * read_step_ends(history) for history in histories]
        totals = [history.read_valid_totals(0, len(end)) for history, end in zip(histories, ends, strict=True)]
        ends = [end[: len(part)] for end, part in zip(ends, totals, strict=True)]  # steps may be undone meanwhile
        losses = [compute_drawn_losses(part) for part in totals]
        exits = find_exits(histories)
        series = self._make_series(totals, losses, ends, exits)
        _end_lines(origin + width * np.arange(len(values)) + width - 1, values[..., 1], exits)
        cap = find_loss_cap(losses)
        has_short = any(find_short_batches(part).any() for part in totals)
        caps = {name: cap if name == "time" else find_metric_cap(histories, name) for name in series}
        means = values[..., 1]
        specs = [getattr(run, "spec", None) for run in self._comparison.runs]
        states = [read_state(run) for run in self._comparison.runs]
        step = max((find_last_step(history) for history in histories), default=0)
        content: dict[str, Any] = {
            "kind": "snapshot",
            "seq": self._seq,
            "status": {"state": "running" if "running" in states else "ended", "step": step},
            "head": {
                "columns": len(states) + 1,
                "charts": {"loss": {"name": "loss", "first": 0, "nodes": len(states), "banded": False}},
                "ranks": len(states),
                "runs": list(self._comparison.short_names),
                "names": list(self._comparison.names),
                "steep": is_steep(means if cap is None else means[means <= cap]),
                "most": cap,
                "left": describe_exits(histories, exits),
                "help": SHORT_BATCH_NOTE if has_short else "",
                "axes": describe_axes(specs, histories, [part["step"] for part in totals], ends),
                **self._build_tables(),
            },
            "curves": {"width": width, "origin": origin, "first": 0, "flat": False, "buckets": len(values)},
            "series": _describe_series(series, caps),
            "effect": {"count": 0, "text": ""},
            "lr": None,
            "error": None,
        }
        content |= {name: [] for name in ("tiles", "notices", "nodes", "marks", "evaluations", "events")}
        points = np.concatenate([np.empty(0), *(part.reshape(-1) for part in series.values())])
        buffers = [np.ascontiguousarray(values, "<f4").tobytes(), b"", points.astype("<f4").tobytes()]
        return Message(content, buffers)

    def _align_curves(self) -> tuple[np.ndarray, int, int]:
        """Return values of shape (buckets, runs + 1, 3), with their width and origin; the last column is empty."""
        for curves, history in zip(self._curves, self._comparison.histories, strict=True):
            curves.update(history)
        width = max(curves.width for curves in self._curves)
        for curves in self._curves:
            curves.widen(width)
        parts = [curves.get_all() for curves in self._curves]
        origin = min((part.origin for part in parts if len(part.values)), default=0)
        starts = [(part.origin - origin) // width for part in parts]
        length = max(start + len(part.values) for start, part in zip(starts, parts, strict=True))
        values = np.full((max(0, length), len(parts) + 1, 3), np.nan, "f4")
        for k, (start, part) in enumerate(zip(starts, parts, strict=True)):
            if len(part.values):
                values[start : start + len(part.values), k] = part.values[:, 0]
        return values, width, origin

    def _make_series(
        self,
        totals: Sequence[np.ndarray],
        losses: Sequence[np.ndarray],
        ends: Sequence[np.ndarray],
        exits: Sequence[int | None],
    ) -> dict[str, np.ndarray]:
        """Return the series by name: loss by time, each validation metric, the throughput, then what runs logged."""
        histories = self._comparison.histories
        drawn = [
            end_line(part["step"], loss, exit_step) for part, loss, exit_step in zip(totals, losses, exits, strict=True)
        ]
        series = {"time": make_time_series(drawn, ends)}
        series |= {name: make_metric_series(histories, name) for name in list_metric_names(histories)}
        if "loss" in series:
            _end_lines(series["loss"][:, 0], series["loss"][:, 1:], exits)
        series[RATE] = make_rate_series(totals)
        shared = list_shared_scalars(histories)[:MAX_SCALARS]
        series |= {LOGGED_PREFIX + name: make_scalar_series(histories, name) for name in shared}
        return {name: points for name, points in series.items() if len(points)}

    def _build_tables(self) -> dict[str, Any]:
        """Return the tables of the kept picture."""
        names, differences = self._comparison.short_names, self._comparison.differences
        order, rows = self._comparison.order, self._comparison.rows
        named = [dataclasses.replace(row, label=names[row.number - 1]) for row in rows]
        numbered = number_rows(rows, names)
        table = _describe_table(make_sorted_table(named, self._comparison.sort_column), order)
        settings = _describe_table(make_differences_table(names, differences, order), order) if differences else None
        return {
            "table": table, "note": "\n".join(list_table_notes(numbered)), "ends": describe_ends(numbered),
            "settings": settings,
        }  # fmt: skip


def _end_lines(steps: np.ndarray, lines: np.ndarray, exits: Sequence[int | None]) -> None:
    """End the lines of runs that left the axes for good. `lines` has a column for each run, and may have more."""
    for k, step in enumerate(exits):
        lines[:, k] = end_line(steps, lines[:, k], step)


def _describe_table(table: Table, order: Sequence[int]) -> dict[str, Any]:
    """Return a table as JSON, with the numbers of its columns of text.

    The page itself writes the numbers of the runs, which are in this `order`, beside their lines.
    """
    texts = [k for k, name in enumerate(table.header) if name in table.text_columns]
    column, direction = table.sorted_column or (None, "none")
    rows = [[formatting.sanitize_text(cell, 200) for cell in row] for row in table.rows]
    return {
        "header": [formatting.sanitize_text(name, 80) for name in table.header],
        "rows": rows,
        "runs": list(order),
        "texts": texts,
        "bold": [list(cell) for cell in table.bold_cells],
        "small": [[*cell, text] for cell, text in table.small_texts.items()],
        "values": [[*cell, value] for cell, value in table.values.items()],
        "high": [k for k, name in enumerate(table.header) if name in table.high_columns],
        "sorted": [direction if name == column else "none" for name in table.header],
    }


def _describe_series(series: Mapping[str, np.ndarray], caps: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Return name, title, cap and place of each series in its buffer, as messages of one run have them."""
    described, first = [], 0
    for name, points in series.items():
        text = formatting.sanitize_text(name.removeprefix(LOGGED_PREFIX), 40)
        is_logged = name.startswith(LOGGED_PREFIX)
        titles = {"time": "Loss against time", RATE: "Throughput"}
        title = titles.get(name, text if is_logged else f"Validation {text}")
        place = {"points": len(points), "lines": points.shape[1] - 1, "first": first}
        described.append({"name": name, "title": title, "most": caps[name], **place})
        first += points.size
    return described

"""Several runs beside each other: loss against steps, loss against bytes, and a table.

A step of one strategy may cost a hundred times the bytes of another's. So the same loss is drawn twice: over the steps,
which tells how well a strategy learns, and over what each rank has sent by then, which tells what that costs on a slow
link. Bytes are counted by the engines, not computed.

A comparison keeps the runs and reads them anew each time it is shown, so it may be made while they train.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dtkit._util import formatting
from dtkit.history.history import History

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

    from dtkit.types import RunSpec

FINAL_LOSS_STEPS = 20
"""Steps over which the final loss is averaged: that of a single step is mostly noise."""


@runtime_checkable
class Comparable(Protocol):
    """What can be compared: a run, or anything else with these two."""

    @property
    def spec(self) -> RunSpec:
        """What was asked for."""
        ...

    @property
    def history(self) -> History:
        """What every rank did in every step."""
        ...


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One run in the table. Bytes are those that one rank sent, as the mean over the ranks; times are in seconds."""

    label: str
    strategy: str
    nodes: int
    steps: int
    loss: float
    """Mean over the last ``LAST`` steps, weighted as the gradients are; NaN before the first step."""
    sent_bytes: float
    bytes_per_step: float
    samples_per_s: float
    seconds: float
    """The steps' times added up: without the time between dispatches."""


class Comparison:
    """What :func:`compare` returns: shown in a notebook it is a figure over a table, as text the table alone.

    While one of its runs goes on it is a live view there, and the figure when none does any more.
    """

    def __init__(
        self, labels: Sequence[str], histories: Sequence[History], strategies: Sequence[str], runs: Sequence[object]
    ) -> None:
        self.labels, self.histories, self._strategies = tuple(labels), tuple(histories), tuple(strategies)
        self.runs = tuple(runs)
        """The runs, or histories where that was given."""

    @property
    def rows(self) -> list[ComparisonRow]:
        """A row a run, as of now."""
        return [_make_row(*item) for item in zip(self.labels, self.histories, self._strategies, strict=True)]

    def figure(self) -> Figure:
        """Loss against steps and against bytes, as a matplotlib Figure."""
        from dtkit.dashboard.figures.comparison_figure import draw_comparison

        return draw_comparison(self.labels, self.histories)

    def to_pandas(self) -> pd.DataFrame:
        """The table as a DataFrame with the labels as its index. Needs pandas."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(row) for row in self.rows]).set_index("label")

    def __repr__(self) -> str:
        rows = list(_format_table(self.rows))
        return "\n".join(
            formatting.format_columns(
                rows, left_aligned=[k for k, name in enumerate(rows[0]) if name not in _NUMBER_COLUMNS]
            )
        )

    def make_mime_bundle(self) -> dict[str, str]:
        """What stays of it in a notebook: a MIME bundle of the figure with its table, a PNG and text."""
        png = base64.b64encode(self._repr_png_()).decode("ascii")
        return {"text/html": self._repr_html_(), "image/png": png, "text/plain": repr(self)}

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from dtkit.dashboard.display import in_notebook

        if in_notebook():
            from dtkit.dashboard.live import comparison_widget

            if comparison_widget.try_show(self):
                return
        display(self.make_mime_bundle(), raw=True)  # type: ignore[no-untyped-call]

    def _repr_png_(self) -> bytes:
        from dtkit.dashboard.figures import run_figure

        return run_figure.render_png(self.figure())

    def _repr_html_(self) -> str:
        from dtkit.dashboard.figures import run_figure

        rows = self.rows
        said = "; ".join(
            f"{row.label}: loss {formatting.format_loss(row.loss)}, {formatting.format_bytes(row.sent_bytes)} sent"
            for row in rows
        )
        return run_figure.format_img_tag(
            self.figure(), f"Loss against steps and against bytes. {said}"
        ) + _format_html_table(rows)


def compare(runs: Iterable[Comparable | History], labels: Sequence[str] | None = None) -> Comparison:
    """Several runs beside each other: loss against steps and against the bytes that each rank sent.

    `runs` are runs, also while they train, or histories (``dtkit.History.from_jsonl(path)``). `labels` name them in the
    figure; without it they are told apart by strategy, or else by name.

    Raises TypeError for anything else, and ValueError for an empty list or for labels that don't fit.
    """
    found = _to_list(runs)
    if not found:
        raise ValueError("compare([]): there is nothing to compare; give at least one run, as in compare([run, other])")
    for k, run in enumerate(found):
        if not isinstance(run, History) and not (isinstance(run, Comparable) and isinstance(run.history, History)):
            raise TypeError(
                f"item {k} is {_describe_value(run)}; compare takes runs and histories. A history that was saved is read by "
                "dtkit.History.from_jsonl(path)"
            )
    histories = [run if isinstance(run, History) else run.history for run in found]
    strategies = ["" if isinstance(run, History) else formatting.sanitize_text(run.spec.strategy, 60) for run in found]
    named = _make_labels(found) if labels is None else _check_labels(labels, len(found))
    return Comparison(named, histories, strategies, found)


def _to_list(runs: Any) -> list[Any]:
    """The runs; a single one is refused before it is taken for a list of its records."""
    if isinstance(runs, str | History) or hasattr(runs, "history") or not isinstance(runs, Iterable):
        raise TypeError(f"compare({_describe_value(runs)}): it takes a list of runs; write compare([run, other])")
    return list(runs)


def _describe_value(value: object) -> str:
    """What was given, short."""
    plain = value is None or isinstance(value, str | int | float)
    return repr(value)[:60] if plain else f"a {type(value).__name__}"


def _check_labels(labels: Sequence[str], count: int) -> list[str]:
    """The user's labels: one a run, all different."""
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels={labels!r}: a list with a name for each run, as in labels=['plain', 'every 8']")
    if len(labels) != count:
        raise ValueError(
            f"labels={list(labels)!r} are {len(labels)} for {formatting.format_count(count, 'run')}; give one for each"
        )
    if len(set(labels)) != count:
        raise ValueError(f"labels={list(labels)!r}: two runs have the same one, and could not be told apart")
    return [formatting.sanitize_text(label, 60) for label in labels]


def _make_labels(runs: Sequence[Comparable | History]) -> list[str]:
    """The first of these that differs between all runs: strategy, name, both, number."""
    specs = [None if isinstance(run, History) else run.spec for run in runs]
    for choice in (
        [spec.strategy if spec else "" for spec in specs],
        [spec.name if spec else "" for spec in specs],
        [f"{spec.name} {spec.strategy}" if spec else "" for spec in specs],
    ):
        if all(choice) and len(set(choice)) == len(choice):
            return [formatting.sanitize_text(label, 60) for label in choice]
    return [
        f"run {k}: {formatting.sanitize_text(spec.strategy, 50)}" if spec else f"run {k}"
        for k, spec in enumerate(specs, 1)
    ]


def _make_row(label: str, history: History, strategy: str) -> ComparisonRow:
    totals = history.totals()
    ranks = int(totals["ranks"].max(initial=0))
    seconds, sent = float(totals["step_s"].sum()), float(totals["sent_bytes"].sum()) / max(1, ranks)
    return ComparisonRow(
        label=label,
        strategy=strategy,
        nodes=ranks,
        steps=len(totals),
        loss=_compute_final_loss(totals[-FINAL_LOSS_STEPS:]),
        sent_bytes=sent,
        bytes_per_step=sent / len(totals) if len(totals) else math.nan,
        samples_per_s=float(totals["samples"].sum()) / seconds if seconds > 0 else math.nan,
        seconds=seconds,
    )


def _compute_final_loss(totals: np.ndarray) -> float:
    weight = float(totals["weight"].sum())
    return float((totals["loss"] * totals["weight"]).sum() / weight) if weight else math.nan


_NUMBER_COLUMNS = ("nodes", "steps", "final loss", "sent per rank", "per step", "samples/s", "time")
"""Columns of numbers; they stand to the right."""

_NUMBER_STYLE, _TEXT_STYLE = (
    "text-align: right; white-space: nowrap",
    "text-align: left",
)  # a number is never cut from its unit


def _format_table(rows: Sequence[ComparisonRow]) -> list[tuple[str, ...]]:
    """The table's header and its cells. Strategies that the labels say already have no column of their own."""
    told = all(row.strategy == row.label for row in rows)
    words = ("run",) if told else ("run", "strategy")
    table: list[tuple[str, ...]] = [(*words, *_NUMBER_COLUMNS)]
    for row in rows:
        names = (row.label,) if told else (row.label, row.strategy or formatting.UNKNOWN)
        table.append((*names, *_format_numbers(row)))
    return table


def _format_numbers(row: ComparisonRow) -> tuple[str, ...]:
    return (
        f"{row.nodes:,}",
        f"{row.steps:,}",
        formatting.format_loss(row.loss) if row.steps else formatting.UNKNOWN,
        formatting.format_bytes(row.sent_bytes),
        formatting.format_bytes(row.bytes_per_step),
        formatting.format_rate(row.samples_per_s),
        formatting.format_duration(row.seconds),
    )


def _format_html_table(rows: Sequence[ComparisonRow]) -> str:
    """The table for a notebook; text of users and engines is escaped."""
    header, *body = _format_table(rows)
    styles = [_NUMBER_STYLE if name in _NUMBER_COLUMNS else _TEXT_STYLE for name in header]

    def line(cells: Iterable[str], tag: str) -> str:
        parts = (f'<{tag} style="{s}">{html.escape(c)}</{tag}>' for s, c in zip(styles, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    lines = "".join(line(cells, "td") for cells in body)
    note = f"final loss: mean of the last {FINAL_LOSS_STEPS} steps; bytes: sent by one rank; time: without that between dispatches"
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{lines}</tbody></table><small>{note}</small>"

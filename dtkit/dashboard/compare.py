"""Several runs next to each other: loss against steps, time and bytes, metrics, and tables.

A step of one strategy may send a hundred times the bytes of another's. The loss over steps shows how well a strategy
learns. The loss over the bytes that each rank sent shows its cost on a slow link. Engines count the bytes.

A comparison reads its runs each time it is shown, so it may be made while they train.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import os.path
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments, suggest_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.completion import UserNames, hide_constructor, hide_from_completion
from dtkit._util.formatting import name_type
from dtkit._util.notebook import in_notebook
from dtkit.dashboard.line_samples import format_notebook_sample
from dtkit.dashboard.summary.activity import read_state
from dtkit.dashboard.summary.comparison import make_row
from dtkit.dashboard.summary.run_end import describe_end
from dtkit.dashboard.summary.run_labels import label_by_settings
from dtkit.dashboard.summary.spec_differences import (
    list_common,
    list_differences,
    list_event_differences,
    list_rate_differences,
)
from dtkit.dashboard.text.comparison_order import find_column, order_rows
from dtkit.dashboard.text.comparison_text import (
    describe_ends,
    describe_rows,
    format_text,
    list_table_notes,
    make_differences_table,
    make_table,
    number_names,
    number_rows,
)
from dtkit.history.history import History

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

    from dtkit.dashboard.summary.comparison import ComparisonRow
    from dtkit.dashboard.written_report import WrittenReport
    from dtkit.types import RunSpec, Status

_MAX_LABEL_CHARS, _MAX_NAME_CHARS = 60, 300
_GAP = "0.8em"  # between tables and picture


@runtime_checkable
class Comparable(Protocol):
    """A run, or another object with these two properties."""

    @property
    def spec(self) -> RunSpec:
        """What the user asked for."""
        ...

    @property
    def history(self) -> History:
        """Records of every rank and step."""
        ...


@runtime_checkable
class _HasStatus(Protocol):
    @property
    def status(self) -> Status: ...


@hide_constructor
@suggest_attributes("comparison")
@hide_from_completion("make_mime_bundle", "sort_column")
@explain_arguments
class Comparison(metaclass=UserNames):
    """Several runs next to each other, which ``dtkit.compare(run, other)`` returns.

    A notebook shows a table over a figure, a terminal the table only. ``report()`` writes both to a file.

    The figure in a notebook is live: its charts zoom and name what is at the pointer, and follow runs that go on.
    """

    sort_column: str
    """The column of the table that `order` is from; "" is none."""

    def __init__(
        self, names: Sequence[str], histories: Sequence[History], strategies: Sequence[str], runs: Sequence[object]
    ) -> None:
        self.names, self.short_names = tuple(names), tuple(_shorten_labels(names))
        """Whole names of the runs, and short ones, for views that number the runs anyway."""
        self.labels = tuple(_number_equal_ones(self.short_names))
        """Short names that tell the runs apart."""
        self.histories, self._strategies = tuple(histories), tuple(strategies)
        self.runs = tuple(runs)
        """The runs, or the histories that were given."""
        self.order: Sequence[int] = tuple(range(len(runs)))
        """Places of the runs in the order of the tables. Numbers and colors are those of the call."""
        self.sort_column = ""

    @property
    def differences(self) -> list[tuple[str, ...]]:
        """What sets the runs apart: (setting, its text in each run), also rates set by hand."""
        return [row for row in self._list_differences() if row[1:] != self.labels]  # labels show this setting

    def _list_differences(self) -> list[tuple[str, ...]]:
        specs = [run.spec if isinstance(run, Comparable) else None for run in self.runs]
        rows = list_differences(specs) + list_rate_differences(specs, self.histories)
        return rows + list_event_differences(self.histories)

    @property
    def common(self) -> list[tuple[str, str]]:
        """What all runs share: (setting, its text). It is empty where a history is compared, which has no settings."""
        return list_common([run.spec if isinstance(run, Comparable) else None for run in self.runs])

    @property
    def rows(self) -> list[ComparisonRow]:
        """A row for each run, as of now, in the order of the tables."""
        positions, states = [_read_position(run) for run in self.runs], [read_state(run) for run in self.runs]
        ends = [describe_end(run, history) for run, history in zip(self.runs, self.histories, strict=True)]
        verifications = [getattr(run, "verification", None) for run in self.runs]  # a history has none
        specs = [run.spec if isinstance(run, Comparable) else None for run in self.runs]
        numbers = range(1, len(specs) + 1)
        columns = self.labels, self.histories, self._strategies, positions, states, ends, verifications, specs, numbers
        rows = [make_row(*item) for item in zip(*columns, strict=True)]
        return [rows[k] for k in self.order]

    def figure(self) -> Figure:
        """Return loss against steps, time, and bytes where they differ, and each metric, as a matplotlib Figure."""
        from dtkit.dashboard.figures.comparison_figure import draw_comparison

        return draw_comparison(self.labels, self.histories, self.order)

    def to_pandas(self) -> pd.DataFrame:
        """Return a row for each run: the numbers of the table, and the settings that differ. Needs pandas.

        The index has the labels. ``run`` is the number that the run has in the views. ``strategy``, ``state``,
        ``failure``, ``cause`` and ``verified`` are texts.

        Numbers are in the columns of the table, such as "samples/s" or "best validation loss"; sizes are in bytes, and
        times in seconds. Further columns are the settings in which the runs differ, such as "batch_size", "seed" or
        "first learning rate". They are numbers where each run has one. A history has no settings, and NaN.

        ``frame.groupby("first learning rate")["final training loss"].agg(["mean", "std"])`` has the mean and the spread
        of runs that differ by their seed.
        """
        from dtkit.dashboard.comparison_frame import make_frame

        return make_frame(self.rows, self.labels, self._list_differences())

    def report(self, path: str | Path = "comparison.html", *, description: str = "") -> WrittenReport:
        """Write the comparison as one self-contained HTML file: table, differences, charts with tooltips.

        `description` is text below the title. Returns the file's place, which a notebook shows as a link.
        """
        from dtkit.dashboard.comparison_report import write_comparison_report

        return write_comparison_report(self, path, description)

    def make_mime_bundle(self) -> dict[str, str]:
        """Return the figure with its table, a PNG, and text, which a saved notebook can show."""
        png = base64.b64encode(self._repr_png_()).decode("ascii")
        return {"text/html": self._repr_html_(), "image/png": png, "text/plain": repr(self)}

    def __repr__(self) -> str:
        rows, differences, width = self.rows, self.differences, shutil.get_terminal_size((0, 0)).columns  # 0: a file
        table = format_text(rows, width)
        if not differences:
            return table
        return f"{table}\n\n{make_differences_table(self.labels, differences, self.order).to_text(max_width=width)}"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if in_notebook():
            from dtkit.dashboard.live import comparison_widget

            if comparison_widget.try_show(self):
                return
        display(self.make_mime_bundle(), raw=True)  # type: ignore[no-untyped-call]

    def _repr_png_(self) -> bytes:
        from dtkit.dashboard.figures.render import render_card_png

        return render_card_png(self.figure())

    def _repr_html_(self) -> str:
        from dtkit.dashboard.figures.comparison_figure import draw_comparison_charts, draw_comparison_legend
        from dtkit.dashboard.figures.render import format_card_tags

        rows = number_rows(self.rows, self.short_names)
        labels, differences = number_names(self.short_names), self.differences
        legend = format_card_tags([draw_comparison_legend(labels, self.order)], f"the lines of {', '.join(labels)}")
        charts = format_card_tags(draw_comparison_charts(labels, self.histories), describe_rows(rows))
        settings = make_differences_table(labels, differences, self.order).to_html() if differences else ""
        parts = [f"<div style='margin-top: {_GAP}'>{part}</div>" for part in (settings, legend, charts) if part]
        note = "<br>".join(html.escape(line, quote=False) for line in list_table_notes(rows))  # they name metrics
        ends = "".join(f"<div style='margin-top: {_GAP}'>{html.escape(line)}</div>" for line in describe_ends(rows))
        note = f"<div style='margin-top: {_GAP}'><small>{note}</small></div>"
        samples = [format_notebook_sample(row.number - 1) for row in rows]
        table = dataclasses.replace(make_table(rows), row_marks=samples)
        return f"{table.to_html()}{ends}{note}{''.join(parts)}"


@suggest_arguments
def compare(
    *runs: Comparable | History | Iterable[Comparable | History],
    labels: Sequence[str] | None = None,
    sort_by: str | None = None,
) -> Comparison:
    """Compare several runs: loss against steps, time and, in ``figure()``, the bytes that each rank sent::

        comparison = dtkit.compare(run, other, labels=["lr 0.1", "lr 0.01"], sort_by="loss")
        comparison  # in the last line of a cell: a table and charts
        comparison.differences  # settings that the runs don't share
        comparison.report("comparison.html")

    `runs` are runs, also while they train, or histories (``dtkit.History.from_jsonl(path)``): ``compare(run, other)``,
    or one list of them. `labels` name them in the figure. Without labels, a run has its name, and its strategy where
    runs of that name differ in it. Runs of one name are named by strategy, or by one or two short settings that tell
    them apart, such as "lr 0.1". Equal ones are numbered.

    `sort_by` puts the rows of tables in the order of a column, or of a metric such as "accuracy", as of this call: the
    best first. Other runs have their difference from it. Colors and numbers follow the order of `runs`.

    The result shows itself as charts and a table: ``figure()``, ``report(path)``, ``to_pandas()``.
    Raises TypeError for anything else, and ValueError for an empty list or for labels or a column that don't fit.
    """
    items = _to_list(runs)
    for k, run in enumerate(items):
        if not isinstance(run, History) and not (isinstance(run, Comparable) and isinstance(run.history, History)):
            raise TypeError(
                f"item {k} is {_describe_value(run)}; compare takes runs and histories. To read a saved history, call "
                "dtkit.History.from_jsonl(path)"
            )
    histories = [run if isinstance(run, History) else run.history for run in items]
    strategies = ["" if isinstance(run, History) else _shorten(run.spec.strategy) for run in items]
    checked_labels = _make_labels(items) if labels is None else _check_labels(labels, len(items))
    comparison = Comparison(checked_labels, histories, strategies, items)
    if sort_by is not None:
        rows = comparison.rows
        comparison.sort_column = find_column(rows, sort_by)
        comparison.order = order_rows(rows, comparison.sort_column)
    return comparison


def _read_position(run: object) -> tuple[int, float] | None:
    """Return the steps and seconds that a run's own views show; None for those of its history."""
    if not isinstance(run, _HasStatus):
        return None
    status = run.status
    return status.step, status.elapsed_s


def _to_list(runs: Sequence[Any]) -> list[Any]:
    """Return the runs: the arguments themselves, or those of a single list."""
    first, *others = runs or ([],)
    if others:
        _refuse_lists(runs)
        return list(runs)
    if _is_run(first):
        raise TypeError(
            f"compare({_describe_value(first)}): one run has nothing to be compared with; call compare(run, other), or "
            "compare([run]) for its curves alone"
        )
    if isinstance(first, str) or not isinstance(first, Iterable):
        raise TypeError(
            f"compare({_describe_value(first)}): it takes runs; call compare(run, other) or compare([run, other])"
        )
    items = list(first)
    if not items:
        raise ValueError("compare([]): there is nothing to compare; give at least one run, as in compare(run, other)")
    return items


def _refuse_lists(runs: Sequence[Any]) -> None:
    """Refuse a list next to other arguments: labels without their name, or a list of runs with a further run."""
    lists = [run for run in runs if isinstance(run, Iterable) and not _is_run(run) and not isinstance(run, str)]
    for items in map(list, lists):
        if items and all(isinstance(item, str) for item in items):
            raise TypeError(f"compare(..., {items!r}): labels need their name: compare(run, other, labels={items!r})")
    if lists:
        raise TypeError(
            f"compare(...) got {_describe_value(lists[0])} next to other arguments; give all runs as arguments, as in "
            "compare(run, other), or all in one list"
        )


def _is_run(value: object) -> bool:
    """Return whether a value is meant as one run. A history is a sequence of its records, too."""
    return isinstance(value, History) or hasattr(value, "history")


def _describe_value(value: object) -> str:
    is_plain = value is None or isinstance(value, str | int | float)
    return repr(value)[:60] if is_plain else name_type(value)


def _check_labels(labels: Sequence[str], count: int) -> list[str]:
    """Return the user's labels: one for each run, all different."""
    if (
        isinstance(labels, str)
        or not isinstance(labels, Iterable)
        or not all(isinstance(label, str) for label in labels)
    ):
        raise TypeError(f"labels={labels!r}: a list with a name for each run, as in labels=['plain', 'every 8']")
    if len(labels) != count:
        raise ValueError(
            f"labels={list(labels)!r} are {len(labels)} for {formatting.format_count(count, 'run')}; give one for each"
        )
    if len(set(labels)) != count:
        raise ValueError(f"labels={list(labels)!r}: two runs have the same label; give each run its own")
    return [formatting.sanitize_text(label, _MAX_NAME_CHARS) for label in labels]


def _make_labels(runs: Sequence[Comparable | History]) -> list[str]:
    """Return each run's name, with its strategy where runs of that name differ in it.

    Runs that all have the same name are named by strategy only, if they differ in it. Where names are still equal,
    settings tell the runs apart.
    """
    specs = [None if isinstance(run, History) else run.spec for run in runs]
    names = [spec.name if spec else "history" for spec in specs]
    strategies = [spec.strategy if spec else "" for spec in specs]
    if len(set(names)) == 1 < len(set(strategies)):
        labels = strategies
    else:
        labels = [
            f"{name} {own}" if len({s for n, s in zip(names, strategies, strict=True) if n == name}) > 1 else name
            for name, own in zip(names, strategies, strict=True)
        ]
    histories = [run if isinstance(run, History) else run.history for run in runs]
    labels = label_by_settings(labels, specs, histories)
    return [formatting.sanitize_text(label, _MAX_NAME_CHARS) for label in labels]


def _number_equal_ones(labels: Sequence[str]) -> list[str]:
    return [
        f"{label} ({labels[: k + 1].count(label)})" if labels.count(label) > 1 else label
        for k, label in enumerate(labels)
    ]


def _shorten_labels(names: Sequence[str]) -> list[str]:
    """Return the names. If one is long, omit the words with which all begin, except for the last of them."""
    common = os.path.commonprefix(list(names)).rpartition(" ")[0]  # noqa: RUF071 - of texts, which aren't paths
    start = common.rfind(" ") + 1
    if len(set(names)) > 1 and start and max(map(len, names)) > _MAX_LABEL_CHARS:
        return [_shorten(f"…{name[start:]}") for name in names]
    shorter = [_shorten(name) for name in names]
    return [
        _omit_middle(name) if shorter.count(label) > len([other for other in names if other == name]) else label
        for name, label in zip(names, shorter, strict=True)
    ]


def _omit_middle(name: str) -> str:
    """Return the beginning and the end of a name that others begin like."""
    half = (_MAX_LABEL_CHARS - 1) // 2
    return name if len(name) <= _MAX_LABEL_CHARS else f"{name[:half]}…{name[-half:]}"


def _shorten(text: str) -> str:
    return formatting.sanitize_text(text, _MAX_LABEL_CHARS)

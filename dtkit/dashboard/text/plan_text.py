"""A plan as text and as HTML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.text.table_page import TablePage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.planning.plan import Plan, PlanRow

MEMORY_PARTS = (
    ("sent_model", "as sent"),
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("activations", "activations"),
    ("overhead", "overhead"),
)
"""Parts of a rank's memory: the field of a row, and the heading of its column."""

_MAX_SHOWN_RANKS = 8  # on more ranks, each strategy is listed with its tightest rank only
_NUM_TIMES = 4  # the last columns of a step
_MAX_NAMES_CHARS = 60  # characters of strategies' names in a headline


def format_text(plan: Plan) -> str:
    """Return the plan as text."""
    return _make_page(plan).to_text()


def format_html(plan: Plan) -> str:
    """Return the plan as HTML."""
    return _make_page(plan).to_html()


def format_headline(plan: Plan) -> str:
    """Return what was planned, and which strategies fit."""
    samples = formatting.format_count(plan.batch_size, "sample")
    ranks = formatting.format_count(plan.world_size, "node")
    fit = _describe_fit(plan.fitting, plan.strategies)
    return f"Plan for {formatting.sanitize_text(plan.model, 60)}: {samples} per update on {ranks}: {fit}"


def find_tightest_row(rows: Sequence[PlanRow]) -> PlanRow:
    """Return the row with the least memory to spare."""
    return min(rows, key=lambda row: row.free - row.needed)


def find_slowest_row(rows: Sequence[PlanRow]) -> PlanRow:
    """Return the row that computes longest, whose times stand for a step."""
    return max(rows, key=lambda row: row.compute_s)


def describe_fastest(plan: Plan) -> str | None:
    """Return a line where one process is faster than every strategy; None otherwise, or if that is not known."""
    one, fastest = plan.one_process, min((row for row in plan.rows), key=lambda row: row.step_s, default=None)
    if one is None or fastest is None or not one.fits or not one.step_s < fastest.step_s:
        return None
    return (
        f"one process is fastest: {format_step_time(one)} a step, and {format_step_time(fastest)} with "
        f"{fastest.strategy}"
    )


def _describe_fit(fitting: Sequence[str], strategies: Sequence[str]) -> str:
    """Return which strategies fit, by name where the names are short."""
    if len(fitting) == len(strategies):
        return "all fit"
    names, many = ", ".join(fitting), len(fitting) > 1
    if len(names) > _MAX_NAMES_CHARS:
        return f"{len(fitting)} of {len(strategies)} strategies {'fit' if many else 'fits'}"
    return f"{names or 'none'} fit" if many or not fitting else f"only {names} fits"


def _make_page(plan: Plan) -> TablePage:
    """Make a page of three tables: a single one would be wider than a cell."""
    shows_all_ranks = plan.world_size <= _MAX_SHOWN_RANKS
    selection = f"{'' if shows_all_ranks else 'memory: of the node with least to spare; '}times: of the slowest node"
    lead = describe_fastest(plan)
    tables = [_make_fit(plan), _make_steps(plan), _make_parts(plan)]
    return TablePage(
        format_headline(plan), tables, [selection, *_describe_times(plan), *plan.notes], [lead] if lead else []
    )


def _describe_times(plan: Plan) -> list[str]:
    """Return which times of steps were measured."""
    estimated = [name for name in plan.strategies if not plan.get_rows(name)[0].is_measured]
    if len(estimated) == len(plan.strategies):
        return []
    lines = ["in all: measured in some steps; other: loading rows, Python, and waiting for the slower node"]
    return [*lines, f"estimated, not measured: the steps of {', '.join(estimated)}"] if estimated else lines


def _make_fit(plan: Plan) -> Table:
    """Make the table of what fits."""
    header = ["strategy", "node", "samples", "needed", "free", "fits"]
    return Table(header, [*_merge_ranks(plan, _format_fit), *_list_one_process(plan, _format_fit)], set(header[:2]))


def _make_steps(plan: Plan) -> Table:
    """Make the table of what a step costs."""
    header = ["strategy", "node", "sent", "computing", "waiting", "other", "in all"]
    rows = [*_merge_ranks(plan, _format_step, _drop_times, find_slowest_row), *_list_one_process(plan, _format_step)]
    if not any(row.is_measured for row in plan.rows):  # then nothing else is known
        header, *rows = ([*cells[:-2], cells[-1]] for cells in [header, *rows])
    return Table(header, rows, set(header[:2]), is_narrow=True, caption="Time of a step")


def _list_one_process(plan: Plan, format_cells: Callable[[PlanRow], list[str]]) -> list[list[str]]:
    row = plan.one_process
    return [] if row is None else [[row.strategy, str(row.rank), *format_cells(row)]]


def _make_parts(plan: Plan) -> Table:
    """Make the table with the parts of the memory that is needed."""
    header = ["strategy", "node", *(name for _, name in MEMORY_PARTS)]
    rows = [*_merge_ranks(plan, _format_parts), *_list_one_process(plan, _format_parts)]
    return Table(header, rows, set(header[:2]), is_narrow=True, caption="Parts of the needed memory")


def _merge_ranks(
    plan: Plan,
    format_cells: Callable[[PlanRow], list[str]],
    get_key: Callable[[list[str]], list[str]] = list,
    find_row: Callable[[Sequence[PlanRow]], PlanRow] = find_tightest_row,
) -> list[list[str]]:
    """Return the cells of each strategy and rank; ranks with the same key share the row of the slowest one.

    Of many ranks, `find_row` chooses one for each strategy.
    """
    if plan.world_size > _MAX_SHOWN_RANKS:
        found = [find_row(plan.get_rows(name)) for name in plan.strategies]
        return [[row.strategy, str(row.rank), *format_cells(row)] for row in found]
    same_rows: dict[tuple[str, ...], list[PlanRow]] = {}
    for row in plan.rows:
        same_rows.setdefault((row.strategy, *get_key(format_cells(row))), []).append(row)
    merged = []
    for (strategy, *_), same in same_rows.items():
        is_all = len(same) == plan.world_size > 1
        ranks = "all" if is_all else ", ".join(str(row.rank) for row in same)
        merged.append([strategy, ranks, *format_cells(find_slowest_row(same))])
    return merged


def format_step_time(row: PlanRow) -> str:
    """Return the time of a step; a lower bound where the time of communication is not known."""
    bound = "" if row.is_traffic_counted or row.is_measured or math.isnan(row.step_s) else "> "
    return f"{bound}{formatting.format_duration(row.step_s)}"


def _drop_times(cells: list[str]) -> list[str]:
    """Return the cells of a step without its times, which differ by some percent between equal ranks."""
    return cells[:-_NUM_TIMES]


def _format_fit(row: PlanRow) -> list[str]:
    return [
        f"{row.rows:,}",
        formatting.format_bytes(row.needed),
        formatting.format_bytes(row.free),
        "yes" if row.fits else "NO",
    ]


def _format_step(row: PlanRow) -> list[str]:
    return [
        formatting.format_bytes(row.sent_bytes),
        formatting.format_duration(row.compute_s),
        _format_waiting(row),
        formatting.format_duration(row.other_s if row.is_measured else None),
        format_step_time(row),
    ]


def _format_waiting(row: PlanRow) -> str:
    """Return the time of communication, or where it is contained if it is not known by itself."""
    if row.is_measured and not row.is_traffic_counted:
        return "in other"
    return formatting.format_duration(row.communication_s if row.is_traffic_counted else None)


def _format_parts(row: PlanRow) -> list[str]:
    return [formatting.format_bytes(getattr(row, field)) for field, _ in MEMORY_PARTS]

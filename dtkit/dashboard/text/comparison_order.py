"""The order of a comparison's runs: the best in a column first."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import TYPE_CHECKING

from dtkit.dashboard.text.comparison_text import BEST_PREFIX, FINAL_LOSS, make_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit._util.table import Table
    from dtkit.dashboard.summary.comparison import ComparisonRow


def order_rows(rows: Sequence[ComparisonRow], column: str) -> list[int]:
    """Return the places of rows in the order of a table's column, the best first.

    Rows without a number are the last, and runs that an error ended.
    """
    return _order_places(rows, make_table(rows), column)


def make_sorted_table(rows: Sequence[ComparisonRow], column: str) -> Table:
    """Return the table of rows that were sorted by a `column`, with its mark; "" is none.

    The mark is left out once numbers of runs that train have another order.
    """
    table = make_table(rows)
    if column not in table.header or _order_places(rows, table, column) != list(range(len(rows))):
        return table
    return dataclasses.replace(table, sorted_column=(column, _name_direction(table, column)))


def _order_places(rows: Sequence[ComparisonRow], table: Table, column: str) -> list[int]:
    index = list(table.header).index(column)
    sign = 1 if _name_direction(table, column) == "ascending" else -1

    def rank(place: int) -> tuple[bool, float]:
        value = table.values.get((place, index), math.nan)
        return not rows[place].competes or math.isnan(value), 0.0 if math.isnan(value) else sign * value

    return sorted(range(len(rows)), key=rank)


def _name_direction(table: Table, column: str) -> str:
    return "descending" if column in table.high_columns else "ascending"


def find_column(rows: Sequence[ComparisonRow], sort_by: str) -> str:
    """Return the column that a user means, by its name in the table of rows, or by that of a metric.

    Raises TypeError or ValueError unless `sort_by` names a column with numbers.
    """
    table = make_table(rows)
    if not isinstance(sort_by, str):
        raise TypeError(f'sort_by={sort_by!r}: the name of a column, as in sort_by="best loss"')
    columns = [name for name in table.header if name not in table.text_columns]
    known = {"loss": FINAL_LOSS, "best loss": FINAL_LOSS} | {
        name: f"{BEST_PREFIX}{metric}"
        for metric in (name.removeprefix(BEST_PREFIX) for name in columns if name.startswith(BEST_PREFIX))
        for name in (metric, f"best {metric}", f"validation {metric}")
    }
    known |= {FINAL_LOSS.removeprefix("final "): FINAL_LOSS} | {name: name for name in columns}
    if sort_by not in known:
        similar = difflib.get_close_matches(sort_by, known, n=1)
        hint = f"did you mean {similar[0]!r}? " if similar else ""
        raise ValueError(f"sort_by={sort_by!r}: {hint}It may be {', '.join(map(repr, sorted(known)))}")
    return known[sort_by]

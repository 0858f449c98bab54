"""The order of a comparison's runs: the best in a column first."""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING

from dtkit.dashboard.text.comparison_text import BEST_PREFIX, FINAL_LOSS, make_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit._util.table import Table
    from dtkit.dashboard.summary.comparison import ComparisonRow


def order_rows(rows: Sequence[ComparisonRow], sort_by: str) -> list[int]:
    """Return the places of rows in the order of a column, the best first. Those without a number are the last.

    So are runs that an error ended. Raises TypeError or ValueError unless `sort_by` names a column with numbers.
    """
    table = make_table(rows)
    column = list(table.header).index(_find_column(table, sort_by))
    sign = -1 if table.header[column] in table.high_columns else 1

    def rank(place: int) -> tuple[bool, float]:
        value = table.values.get((place, column), math.nan)
        return not rows[place].competes or math.isnan(value), 0.0 if math.isnan(value) else sign * value

    return sorted(range(len(rows)), key=rank)


def _find_column(table: Table, sort_by: str) -> str:
    """Return the column that a user means, by its name in the table, or by that of a metric."""
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

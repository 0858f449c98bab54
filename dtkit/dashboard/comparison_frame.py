"""A comparison as a data frame: numbers and settings of each run, in columns that can be grouped."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.text.comparison_text import list_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from dtkit.dashboard.summary.comparison import ComparisonRow

_TEXT_FIELDS = ("strategy", "state", "failure", "cause", "verified")  # of a row
_GROUPED_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_WHOLE_NUMBER = re.compile(r"-?\d+")


def make_frame(
    rows: Sequence[ComparisonRow], labels: Sequence[str], differences: Sequence[tuple[str, ...]]
) -> pd.DataFrame:
    """Return the rows of a table with the settings that differ. `labels` and `differences` are in the order of runs."""
    import pandas as pd

    index = pd.Index([row.label for row in rows], name="label")
    texts = [{"run": row.number} | {name: getattr(row, name) for name in _TEXT_FIELDS} for row in rows]
    table = pd.DataFrame(texts, index).join(pd.DataFrame([list_numbers(row) for row in rows], index))
    settings = pd.DataFrame({name: read_numbers(values) for name, *values in differences}, labels).reindex(index)
    for name in [name for name in settings if name in table]:
        if name in _TEXT_FIELDS:  # a row has the beginning of a long text
            table[name] = settings[name]
    return table.join(settings[[name for name in settings if name not in table]])


def read_numbers(texts: Sequence[str]) -> list[str] | list[int] | list[float]:
    """Return the numbers in texts such as ``1,440``, and NaN for a dash; the texts where one of them has no number."""
    plain = [text.replace(",", "") if _GROUPED_NUMBER.fullmatch(text) else text for text in texts]
    if plain and all(_WHOLE_NUMBER.fullmatch(text) for text in plain):
        return [int(text) for text in plain]
    try:
        numbers = [math.nan if text == formatting.UNKNOWN else float(text) for text in plain]
    except ValueError:
        return list(texts)
    return list(texts) if all(map(math.isnan, numbers)) else numbers
